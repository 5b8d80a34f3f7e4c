"""What is wrong with states is said on all ranks, and leaves the trainer as it was."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, List, Tuple

import mxnet as mx
import pytest

from gluon_esgd import ElasticTrainer, world

from ..pool import Pools, Shape
from .problems import batches, flat, network, train_step
from .states import (
    BACK,
    SAVED,
    OwnSchedule,
    make,
    momentum,
    train,
    uninterrupted,
)


def _deferred_narrower(folder: str) -> str:
    """What the shapes are shows when the first samples come."""
    net = network(deferred=True)
    trainer = make("momentum", net)
    trainer.load_states(os.path.join(folder, "states"))
    x, y = batches()
    try:
        train_step(net, trainer, x[0][:, :4], y[0])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.servers
def test_a_center_of_another_network_is_refused_at_the_start(pools: Pools, tmp_path: Path) -> None:
    pool = pools.get(Shape(2, 1, 1, "esgd"))
    pool.run(uninterrupted, str(tmp_path), "momentum", 1)
    wanted = (
        "the states that were loaded hold a center of 163 floats, but the network has 131: load "
        "those that were saved with this network"
    )
    assert pool.run(_deferred_narrower, str(tmp_path)) == [wanted] * 2


def _refused(names: List[str], kind: str) -> List[Tuple[str, str]]:
    net = network(hidden=5) if kind == "wide" else network()
    params = net.collect_params()
    given = list(params.values())[:2] if kind == "few" else params
    trainer = ElasticTrainer(given, "adam" if kind == "adam" else "sgd", {"learning_rate": 0.1})
    said = []
    for name in names:
        try:
            trainer.load_states(name)
            said.append(("", ""))
        except (ValueError, OSError) as error:
            said.append((type(error).__name__, str(error)))
    before = flat(net)
    if kind != "few":
        x, y = batches()
        train_step(net, trainer, x[0], y[0])
        assert trainer.learning_rate == 0.1 and (flat(net) != before).any()
    trainer.finish()
    return said


@pytest.mark.mpi
def test_bad_files_are_said_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    pool = pools.get(Shape(2))
    pool.run(uninterrupted, str(tmp_path), "momentum", 1)
    good = tmp_path / "states"
    names = {name: str(tmp_path / name) for name in ("none", "cut", "foreign", "empty", "folder")}
    Path(names["cut"]).write_bytes(good.read_bytes()[:-100])
    Path(names["foreign"]).write_text("lr: 0.1\n")
    Path(names["empty"]).touch()
    Path(names["folder"]).mkdir()
    results = pool.run(_refused, list(names.values()), "plain")
    assert results[0] == results[1]
    wanted = [
        ("FileNotFoundError", f"[Errno 2] No such file or directory: '{names['none']}'"),
        (
            "ValueError",
            f"{names['cut']} is damaged or was cut short (BadZipFile: File is not a zip file)",
        ),
        (
            "ValueError",
            f"{names['foreign']} is no states file of gluon_esgd or gluon.Trainer, or was cut",
        ),
        ("ValueError", f"{names['empty']} is empty: it is no states file"),
        ("IsADirectoryError", f"[Errno 21] Is a directory: '{names['folder']}'"),
    ]
    for (kind, text), (kind_wanted, text_wanted) in zip(results[0], wanted):
        assert kind == kind_wanted and text.startswith(text_wanted)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "adam",
            "holds the states of optimizer 'SGD', but the trainer has 'Adam': make the trainer "
            "with 'SGD'",
        ),
        ("few", "is of 4 parameters, but the trainer has 2"),
        ("wide", r"has shape \(16,\) for parameter 0, but \w+0_bias of the trainer has \(5,\)"),
    ],
)
def test_a_file_of_another_trainer_is_refused_on_all_ranks(
    pools: Pools, kind: str, message: str, tmp_path: Path
) -> None:
    pool = pools.get(Shape(2))
    pool.run(uninterrupted, str(tmp_path), "momentum", 1)
    for ((name, text),) in pool.run(_refused, [str(tmp_path / "states")], kind):
        assert name == "ValueError"
        assert re.fullmatch(re.escape(str(tmp_path / "states")) + " " + message, text)


def _unlike_ranks(folder: str) -> str:
    """The scheduler is one of the script, and on rank 1 the trainer has none."""
    fname = os.path.join(folder, "states")
    trainers = [
        ElasticTrainer(
            network().collect_params(),
            mx.optimizer.SGD(lr_scheduler=OwnSchedule(0.1), learning_rate=0.1),
        )
        for _ in range(2)
    ]
    trainers[0].save_states(fname)
    if world().rank == 1:
        trainers[1].optimizer.lr_scheduler = None
    try:
        trainers[1].load_states(fname)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.mpi
def test_what_one_rank_refuses_all_refuse(pools: Pools, tmp_path: Path) -> None:
    said = pools.get(Shape(2)).run(_unlike_ranks, str(tmp_path))
    assert said[0] == said[1]
    assert said[0].startswith(f"rank 1: {tmp_path / 'states'} has a learning rate scheduler")


class _Talkative(mx.optimizer.SGD):
    """Its state is more than arrays."""

    def create_state(self, index: int, weight: Any) -> Any:
        return {1, 2}


def _cannot_save(folder: str) -> List[Tuple[str, str]]:
    net = network()
    trainer = make("momentum", net)
    train(net, trainer, 0, 1)
    odd = ElasticTrainer(net.collect_params(), _Talkative(learning_rate=0.1))
    train(net, odd, 0, 1)
    said = []
    os.makedirs(os.path.join(folder, "taken", "inside"), exist_ok=True)
    for each, name in ((trainer, "nowhere/states"), (trainer, "taken"), (odd, "states")):
        try:
            each.save_states(os.path.join(folder, name))
        except (ValueError, OSError) as error:
            said.append((type(error).__name__, str(error)))
    trainer.save_states(os.path.join(folder, "good"))
    return said


@pytest.mark.mpi
def test_what_cannot_be_saved_is_said_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    results = pools.get(Shape(2)).run(_cannot_save, str(tmp_path))
    nowhere = tmp_path / "nowhere" / "states"
    assert results[0] == results[1] == [
        ("FileNotFoundError", f"[Errno 2] No such file or directory: '{nowhere}'"),
        ("IsADirectoryError", f"[Errno 21] Is a directory: '{tmp_path / 'taken'}'"),
        (
            "ValueError",
            "optimizer '_Talkative' keeps a set in its state of parameter 0, which a states file "
            "does not hold: only numbers and dense arrays",
        ),
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "taken"]


def _around_the_center(folder: str) -> Tuple[bool, str]:
    fname = os.path.join(folder, "states")
    net = network()
    trainer = make("momentum", net)
    trainer.save_states(fname)  # before the first step
    train(net, trainer, 0, SAVED)
    trainer.save_states(fname)
    before = momentum(trainer)
    said = ""
    with trainer.center():
        trainer.save_states(fname)
        try:
            trainer.load_states(fname)
        except RuntimeError as error:
            said = str(error)
    trainer.load_states(fname)
    return momentum(trainer) == before and trainer._replica._step == SAVED, said


@pytest.mark.parametrize("shape", BACK)
def test_states_and_the_center(pools: Pools, shape: Shape, tmp_path: Path) -> None:
    for same, said in pools.get(shape).run(_around_the_center, str(tmp_path)):
        assert same
        assert said == (
            "the network holds the center's weights: leave `with trainer.center():` before "
            "loading states"
        )
