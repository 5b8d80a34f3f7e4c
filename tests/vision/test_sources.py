"""Which pictures ranks see, also of a job that is killed inside an epoch and goes on."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import mxnet as mx
import pytest
from mxnet import gluon

from gluon_esgd.data.records import largest_label
from gluon_esgd.vision import input_rate, open_pictures, record_source
from gluon_esgd.vision.pictures import reading_threads

from ..data.pictures import write_pictures
from ..pool import ROOT, environment, mpiexec

EPOCHS, BATCHES, SIZE, RANKS = 3, 5, 4, 2


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many pictures as two ranks take in five batches of four, each with a label of its own."""
    folder = tmp_path_factory.mktemp("records")
    write_pictures(folder / "train.rec", RANKS * BATCHES * SIZE)
    write_pictures(folder / "val.rec", 7)
    return folder


def trains(records: str, output: str, kill_at: str) -> None:
    """Note each batch before its step; SIGKILL before the one at `kill_at`, unless it is empty."""
    from gluon_esgd import ElasticTrainer, world
    from gluon_esgd.checkpoint import TrainingState

    pictures, me = open_pictures(records, batch_size=SIZE, image_size=8), world()
    net = gluon.nn.Dense(1, in_units=3 * 8 * 8)
    net.initialize()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    state = TrainingState(
        net, trainer, sampler=pictures.sampler, folder=output, every_steps=2, background=True
    )
    with open(os.path.join(output, f"rank{me.rank}.jsonl"), "a") as seen:
        for epoch in state.epochs(EPOCHS):
            for data, label in state.batches(pictures.train):
                place = epoch * BATCHES + state.batch
                labels = label.asnumpy().astype(int).tolist()
                seen.write(json.dumps([place, labels, float(data.sum().asscalar())]) + "\n")
                seen.flush()
                if kill_at and place == int(kill_at) and me.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                with mx.autograd.record():
                    loss = net(data.reshape((SIZE, -1)))
                loss.backward()
                trainer.step(SIZE)


def job(records: Path, output: Path, kill_at: str = "") -> int:
    output.mkdir(exist_ok=True)
    call = "from tests.vision.test_sources import trains; import sys; trains(*sys.argv[1:])"
    argv = [*mpiexec(sys.executable), "-n", RANKS, sys.executable, "-c", call]
    argv += [records, output, kill_at]
    ended = subprocess.run(
        list(map(str, argv)), env=environment(), cwd=ROOT, timeout=100, capture_output=True
    )
    return ended.returncode


def seen(output: Path) -> List[Dict[int, List[Any]]]:
    """What each rank saw at each place; what came last counts, and is what was there before."""
    ranks = []
    for rank in range(RANKS):
        places: Dict[int, List[Any]] = {}
        for line in (output / f"rank{rank}.jsonl").read_text().splitlines():
            place, *what = json.loads(line)
            assert places.setdefault(place, what) == what, "a batch that is done again is the same"
        ranks.append(places)
    return ranks


@pytest.mark.mpi
def test_a_job_that_is_killed_goes_on_with_the_right_pictures(
    records: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert job(records, whole) == 0
    assert job(records, killed, kill_at=str(BATCHES + 3)) != 0
    assert max(seen(killed)[1]) == BATCHES + 3
    assert job(records, killed) == 0
    assert seen(killed) == seen(whole)
    lines = (killed / "rank0.jsonl").read_text().splitlines()
    assert len(lines) < EPOCHS * BATCHES + 4, "it did not begin anew"
    for epoch in range(EPOCHS):
        places = range(epoch * BATCHES, (epoch + 1) * BATCHES)
        counts = Counter(k for rank in seen(killed) for place in places for k in rank[place][0])
        assert counts == dict.fromkeys(range(RANKS * BATCHES * SIZE), 1)


def test_each_picture_is_validated_once(records: Path) -> None:
    pictures = open_pictures(str(records), batch_size=SIZE, image_size=8)
    for _ in range(2):
        assert [int(k) for _, y in pictures.validation() for k in y.asnumpy()] == list(range(7))
    assert pictures.validation_count == 7
    assert pictures.num_classes == 7, "labels 0 to 6: there is no classes.txt"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 20])
def test_ranks_validate_each_picture_once_however_many_they_are(
    records: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    found: List[int] = []
    for rank in range(size):
        monkeypatch.setattr(
            record_source, "world", lambda rank=rank: SimpleNamespace(size=size, rank=rank)
        )
        make = partial(mx.io.ImageRecordIter, data_shape=(3, 8, 8), verbose=False)
        _, batches = record_source._validation(str(records / "val.rec"), 4, make)
        found += [int(k) for _, y in batches() for k in y.asnumpy()]
    assert sorted(found) == list(range(7))


def test_labels_that_are_no_classes_are_named(tmp_path: Path) -> None:
    write_pictures(tmp_path / "val.rec", 3, label=lambda i: i + 0.5)
    with pytest.raises(ValueError, match=r"val\.rec: the label of key 0 is not one class"):
        largest_label(tmp_path / "val.rec")


@pytest.mark.parametrize(
    "bind, places, split, cores, threads",
    [
        ("cores", "0/4;1/4", False, 2, 2),
        ("none", "0/4;1/4", False, 8, 2),
        ("none", "0/4;0/2;1/2;0/1", False, 8, 4),
        ("none", "0/4;0/2;1/2;0/1", True, 8, 8),
        ("none", None, False, 8, 8),
        ("none", "0/4;1/4", False, 2, 1),
    ],
)
def test_threads_are_those_that_a_rank_has(
    monkeypatch: pytest.MonkeyPatch, bind: str, places: Any, split: bool, cores: int, threads: int
) -> None:
    settings = SimpleNamespace(bind=bind, places=places, is_split=split)
    me = SimpleNamespace(settings=settings, machine_size=1, rank=1, worker_rank=3)
    monkeypatch.setattr("gluon_esgd.vision.pictures.world", lambda: me)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    assert reading_threads() == threads


def test_the_rate_of_input_leaves_the_epoch_as_it_was(records: Path) -> None:
    pictures = open_pictures(str(records), batch_size=SIZE, image_size=8)
    assert input_rate(pictures) > 0
    assert pictures.sampler.epoch == 0


def test_a_client_that_is_started_again_measures_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    me = SimpleNamespace(settings=SimpleNamespace(life=1))
    monkeypatch.setattr("gluon_esgd.vision.pictures.world", lambda: me)
    pictures: Any = SimpleNamespace(train=iter(lambda: pytest.fail("it reads"), None))
    assert math.isnan(input_rate(pictures))


def test_noise_has_the_form_of_pictures() -> None:
    pictures = open_pictures(batch_size=2, image_size=8, synthetic=(9, 5))
    batches = list(pictures.train)
    assert len(batches) == len(pictures.train) == 4 and pictures.train_count == 8
    assert batches[0][0].shape == (2, *pictures.shape) and batches[0][1].asnumpy().max() < 5


def test_samples_are_of_mean_zero_and_deviation_one(records: Path) -> None:
    (data, _), *_ = open_pictures(str(records), batch_size=32, image_size=8).train
    values = data.asnumpy()
    assert abs(values.mean()) < 0.5 and 0.7 < values.std() < 1.5


def test_a_folder_without_pictures_is_told_apart(tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises((OSError, ValueError)) as failed:
            open_pictures(str(tmp_path / "here"), batch_size=2)
        return str(failed.value)

    assert message().endswith("/here': no such folder")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "cat.jpg").touch()
    for layout in ("RecordIO", "class folders", "IDX files"):
        assert layout in message()
    (tmp_path / "here" / "train-images-idx3-ubyte.gz").touch()
    assert "has no train-labels-idx1-ubyte, t10k-images" in message()
