"""A checkpoint is there as a whole or refused, and the one before it is taken."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, List

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer
from gluon_esgd.checkpoint import TrainingState, content, folder

from ..pool import ROOT, environment
from .loops import make, positions, weights


@pytest.fixture(scope="module")
def sample(tmp_path_factory: Any) -> bytes:
    """The bytes of a small checkpoint."""
    _, _, state, _ = make(str(tmp_path_factory.mktemp("sample")), hidden=2)
    return Path(state.save()).read_bytes()


def test_every_cut_is_refused_by_name(sample: bytes) -> None:
    content.read(sample, "whole.npz")
    assert len(sample) < 40_000
    ends = {*range(300), *range(len(sample) - 2500, len(sample)), *range(0, len(sample), 97)}
    for length in sorted(ends):
        with pytest.raises(ValueError, match=r"^cut\.npz is (empty|damaged or was cut short)"):
            content.read(sample[:length], "cut.npz")


def test_a_changed_byte_is_refused_or_changes_nothing(sample: bytes) -> None:
    whole = contents(sample)
    for at in random.Random(0).sample(range(len(sample)), 400):
        changed = bytearray(sample)
        changed[at] ^= 1 << at % 8
        try:
            found = contents(bytes(changed))
        except ValueError:
            continue
        assert found == whole, at


def contents(data: bytes) -> Any:
    """All that is in a checkpoint, for comparing."""
    out: List[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, np.ndarray):
            out.append((value.dtype.str, value.shape, value.tobytes()))
        elif isinstance(value, dict):
            for item in value.items():
                walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        else:
            out.append(vars(value) if hasattr(value, "__dict__") else value)

    found = content.read(data, "x.npz")
    walk([vars(found.states), {k: v for k, v in vars(found).items() if k != "states"}])
    return repr(out)


def test_others_are_refused_by_name(tmp_path: Any) -> None:
    net, trainer, state, _ = make(str(tmp_path))
    for write, text in {
        lambda path: trainer.save_states(path): "pickle|damaged",
        lambda path: net.save_parameters(path): "damaged",
        lambda path: np.savez(path, a=np.ones(3)): "is a zip archive, but no checkpoint file",
        lambda path: Path(path).write_bytes(b"hello"): "damaged",
    }.items():
        path = str(tmp_path / "other.npz")
        write(path)
        with pytest.raises(ValueError, match=rf"other\.npz.*({text})"):
            state.load(path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        state.load(str(tmp_path / "nothing"))


def test_damage_lets_the_one_before_be_taken(tmp_path: Any, caplog: Any) -> None:
    _, _, state, _ = make(str(tmp_path))
    paths = []
    for state.epoch in (1, 2, 3):
        paths.append(state.save())
    os.truncate(paths[2], 500)
    _, _, state, _ = make(str(tmp_path))
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"cut short (BadZipFile: File is not a zip file); the one before it is {paths[1]}"
        ),
    ):
        state.load(paths[2])
    with caplog.at_level(logging.WARNING):
        assert state.load() == paths[1]
    assert "looking for the checkpoint before it" in caplog.text and paths[2] in caplog.text
    assert state.epoch == 2
    for path in paths[:2]:
        os.truncate(path, 0)
    with pytest.raises(ValueError, match=r"no checkpoint is whole: .*; remove them to start anew"):
        state.load()


def test_another_network_is_refused_with_names(tmp_path: Any) -> None:
    _, _, state, _ = make(str(tmp_path / "a"))
    path = state.save()
    net, _, other, _ = make(str(tmp_path / "b"), hidden=5)
    with pytest.raises(ValueError, match=r"has 0\.weight as float32 of shape \(16, 6\), but"):
        other.load(path)
    net.add(gluon.nn.Dense(2, in_units=3))
    net[4].initialize()
    with pytest.raises(ValueError, match=r"without 4\.weight, 4\.bias, which this one has; "):
        other.load(path)
    unchanged, _, adam, _ = make(str(tmp_path / "b"), "adam")
    unchanged[0].weight.set_data(mx.nd.ones((16, 6)))
    before = weights(unchanged)
    with pytest.raises(ValueError, match="holds the states of optimizer 'SGD', but"):
        adam.load(path)
    assert weights(unchanged) == before


def test_the_newest_are_kept_and_all_is_private(tmp_path: Any) -> None:
    root = tmp_path / "run" / "checkpoints"
    _, _, state, _ = make(str(root), keep=2)
    left = root / "client0" / ".checkpoint-000001-epoch0-batch0.npz.123.tmp"
    left.parent.mkdir(parents=True, mode=0o700)
    left.write_bytes(b"of a writer that was killed")
    for state.epoch in (1, 2, 3, 1):
        path = state.save()
    assert positions(str(root)) == [(1, 0), (3, 0)], "by when they were written"
    assert sorted(os.listdir(state.folder)) == [
        "checkpoint-000003-epoch3-batch0.npz", "checkpoint-000004-epoch1-batch0.npz",
    ]  # fmt: skip
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    shutil.rmtree(tmp_path / "run")
    state.save()
    for made in (tmp_path / "run", root, root / "client0"):
        assert stat.S_IMODE(os.stat(made).st_mode) == 0o700


def test_a_network_is_loaded_before_its_first_batch(tmp_path: Any) -> None:
    found = []
    for width in (3, 0):
        net = gluon.nn.Dense(2, in_units=width)
        net.initialize()
        trainer = ElasticTrainer(net.collect_params(), "sgd")
        state = TrainingState(net, trainer, folder=str(tmp_path))
        state.load(None if found else state.save())
        found.append(weights(net))
    assert found[0] == found[1]
    state = TrainingState(gluon.nn.Dense(2, in_units=3), trainer, folder=str(tmp_path))
    with pytest.raises(ValueError, match=r"'weight' is not .* call net\.initialize\(\) before"):
        state.load()


def test_random_numbers_go_on(tmp_path: Any) -> None:
    _, _, state, _ = make(str(tmp_path))
    random.seed(5)
    np.random.seed(6)
    mx.random.seed(7)
    np.random.randn()  # half of a pair
    path = state.save()
    wanted = draw()
    _, _, state, _ = make(str(tmp_path))
    state.load(path)
    assert draw() == wanted
    state.load(path)
    assert draw() == wanted
    assert state._sampler.epoch == 0


def draw() -> List[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        *np.random.randn(3),
        *mx.nd.random.normal(shape=(3,)).asnumpy().tolist(),
    ]


def test_the_samplers_epoch_is_saved(tmp_path: Any) -> None:
    _, _, state, _ = make(str(tmp_path))
    state._sampler.set_epoch(41)
    next(iter(state._sampler))
    path = state.save()
    _, _, state, _ = make(str(tmp_path))
    state.load(path)
    assert state._sampler.epoch == 42


def test_the_background_writes_while_training_goes_on(tmp_path: Any, monkeypatch: Any) -> None:
    may_write, threads = threading.Event(), []
    write = folder.write

    def slow(*args: Any) -> None:
        threads.append(threading.current_thread().name)
        assert may_write.wait(30)
        write(*args)

    monkeypatch.setattr(folder, "write", slow)
    net, _, state, _ = make(str(tmp_path), background=True)
    saved = weights(net)
    path = state.save()
    assert not os.path.exists(path)
    for param in net.collect_params().values():
        param.set_data(param.data() + 1)  # what was saved are copies
    may_write.set()
    assert state.save() != path, "the next one waits for the last one"
    assert os.path.exists(path)
    state.wait()
    assert threads == ["checkpoint writer"] * 2
    state.load(path)
    assert weights(net) == saved


def test_a_failure_in_the_background_is_raised_by_the_next_call(
    tmp_path: Any, monkeypatch: Any
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "write", full)
    _, _, state, _ = make(str(tmp_path), background=True)
    path = state.save()
    with pytest.raises(OSError, match=r"No space left on device.*checkpoint-000001"):
        state.save()
    state.wait()
    assert os.listdir(os.path.dirname(path)) == []
    monkeypatch.undo()
    assert state.load(state.save())


def save_for_ever(root: str, number: int) -> None:
    """Save again and again; the parameters say which save it was."""
    net, _, state, _ = make(root, hidden=SIZE, keep=2, background=number % 2 > 0)
    for state.epoch in range(1, 1 << 30):
        for param in net.collect_params().values():
            param.set_data(mx.nd.full(param.shape, state.epoch))
        state.save()


def test_a_whole_one_is_there_whenever_the_writer_is_killed(tmp_path: Any) -> None:
    script = FORKS.format(module=__name__, folder=str(tmp_path))
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1, "no kill has met a write"
    _, _, state, _ = make(str(tmp_path), hidden=SIZE)
    assert state.load() == folder.entries(state.folder)[0].path
    state.save()
    assert not [name for name in os.listdir(state.folder) if name.endswith(".tmp")]


SIZE = 20_000  # a megabyte
FORKS = """
import os, random, signal, time
from {module} import check_all, save_for_ever
moments, cut = random.Random(1), 0
for number in range(50):
    pid = os.fork()  # importing MXNet takes longer than all the rest
    if pid == 0:
        save_for_ever({folder!r}, number)
    while not check_all({folder!r}, at_least=1 + number):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it has ended by itself"
        time.sleep(0.01)
    time.sleep(moments.uniform(0, 0.05))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert check_all({folder!r})
    cut += any(name.endswith(".tmp") for name in os.listdir(os.path.join({folder!r}, "client0")))
print(cut)
"""


def check_all(root: str, at_least: int = 1) -> bool:
    """Whether there are checkpoints up to this number; each that can be seen must be whole."""
    found = folder.entries(folder.folder_of(root, 0))
    for entry in found:
        try:
            data = Path(entry.path).read_bytes()
        except FileNotFoundError:  # two newer ones are there by now
            continue
        inside = content.read(data, entry.path)
        assert (inside.parameters["3.weight"].host == inside.epoch).all()
    return bool(found) and found[0].number >= at_least
