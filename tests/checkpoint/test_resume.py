"""A run that was interrupted is the run that was not."""

from __future__ import annotations

import os
from typing import Any, List

import numpy as np
import pytest

from gluon_esgd.checkpoint.content import read
from gluon_esgd.checkpoint.folder import entries, folder_of

from ..pool import Pools, Shape
from .loops import EPOCHS, OPTIMIZERS, Outcome, make, positions, run, statistics, weights

TWO = pytest.mark.parametrize("shape", [pytest.param(Shape(2), marks=pytest.mark.mpi)])
ALL = [(epoch, batch) for epoch in range(EPOCHS) for batch in range(6)]


@TWO
@pytest.mark.parametrize("stop", [(1, 4), (1, 0), (0, 1)], ids=["in", "between", "unsaved"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_two_ranks_go_on_to_the_bit(
    pools: Pools, shape: Shape, optimizer: str, stop: Any, tmp_path: Any
) -> None:
    pool = pools.get(shape)
    whole = pool.run(run, str(tmp_path / "whole"), optimizer)
    cut = str(tmp_path / "cut")
    pool.run(interrupted, cut, optimizer, stop)
    resumed = pool.run(run, cut, optimizer)
    for before, after in zip(whole, resumed):
        assert (after.weights, after.statistics) == (before.weights, before.statistics)
        # Nothing is done twice but what came after the last checkpoint, every 3 steps.
        assert after.seen == ALL[ALL.index(stop) // 3 * 3 :]
    assert whole[0].statistics != whole[1].statistics, "each rank has running statistics of its own"


def interrupted(folder: str, optimizer: str, stop: Any) -> None:
    assert run(folder, optimizer, stop, every_steps=3) is None


def test_dropout_and_a_shuffling_loader_go_on_to_the_bit(tmp_path: Any) -> None:
    whole = run_shuffled(str(tmp_path / "whole"))
    assert run_shuffled(str(tmp_path / "cut"), stop=(1, 5)) == []
    np.random.seed(99)  # a new process has other random numbers
    resumed = run_shuffled(str(tmp_path / "cut"))
    assert np.isfinite(whole).all() and resumed == whole[6 + 4 :]


def run_shuffled(folder: str, stop: Any = None) -> List[Any]:
    """Outputs under dropout, of batches drawn by numpy's global generator."""
    from mxnet import autograd, gluon

    net, trainer, state, loader = make(folder, "adam", dropout=0.5, every_steps=2)
    loader = gluon.data.DataLoader(loader._dataset, 8, shuffle=True)
    out: List[Any] = []
    for epoch in state.epochs(2):
        for x, _ in state.batches(loader):
            if (epoch, state.batch) == stop:
                return []
            with autograd.record():
                loss = net(x.astype("float32")).square()
            loss.backward()
            trainer.step(len(x))
            out.append((float(loss.sum().asscalar()), float(np.random.rand())))
    return out


@pytest.mark.mpi
def test_another_number_of_ranks_begins_the_epoch_again(pools: Pools, tmp_path: Any) -> None:
    folder = str(tmp_path)
    pools.get(Shape(2)).run(interrupted, folder, "momentum", (1, 4))
    before = pools.get(Shape(2)).run(parameters, folder)
    three = pools.get(Shape(3)).run(parameters, folder)
    assert positions(folder)[0] == (1, 3)
    for found in three:
        assert found["place"] == (1, 0)
        assert found["weights"] == before[0]["weights"]
        assert found["steps"] == 9
    mean = np.mean([found["statistics"] for found in before], 0)
    np.testing.assert_allclose([found["statistics"] for found in three], [mean] * 3, rtol=1e-6)
    alone = run(folder)
    assert alone is not None
    assert alone.seen[0] == (1, 0) and alone.seen[-1] == (2, 11)


def parameters(folder: str) -> Any:
    """What a rank has after loading."""
    net, trainer, state, _ = make(folder)
    state.load()
    return {
        "place": (state.epoch, state.batch),
        "weights": weights(net),
        "steps": trainer._optimizer.num_update,
        "statistics": statistics(net),
    }


CLIENTS = Shape(4, 2, 1, "esgd")


@pytest.mark.servers
def test_each_client_goes_on_from_its_own(pools: Pools, tmp_path: Any) -> None:
    folder, pool = str(tmp_path), pools.get(CLIENTS)
    saved = pool.run(train_clients, folder)
    assert [len(set(saved[k : k + 2])) for k in (0, 2)] == [1, 1]
    assert saved[0] != saved[2]
    loaded = pool.run(resume_clients, folder)
    assert [found for found, _ in loaded] == saved, "weights of its own"
    assert {center for _, center in loaded[:2]} == {loaded[0][1]}
    assert pool.run(resume_with_life, folder) == [True] * 4
    # One client less: all take client 0's, and a client of its own number is not asked.
    alone = pools.get(Shape(2)).run(parameters, folder)
    assert [found["weights"] for found in alone] == saved[:2]


def train_clients(folder: str) -> str:
    from ..training.problems import train_step

    net, trainer, state, loader = make(folder, interval=4)
    for _ in state.epochs(1):
        for x, y in state.batches(loader):
            train_step(net, trainer, x.asnumpy(), y.asnumpy())
    found = weights(net)
    trainer.finish()
    return found


def resume_clients(folder: str) -> Any:
    net, trainer, state, _ = make(folder, interval=4)
    path = state.load()
    assert f"client{state._world.client}" in path
    own = weights(net)
    with trainer.center(sync=True):
        center = weights(net)
    assert own == weights(net)
    trainer.finish()
    return own, center


def resume_with_life(folder: str) -> bool:
    """A client that was started again takes the center, and its own states and place."""
    from gluon_esgd import world

    settings = world().settings
    object.__setattr__(settings, "life", 1)
    try:
        net, trainer, state, _ = make(folder, interval=4)
        assert f"client{world().client}" in state.load()
        with trainer.center(sync=True):
            center = weights(net)
        same = weights(net) == center
        assert trainer._replica._step == trainer._optimizer.num_update > 0
        trainer.finish()
        return same
    finally:
        object.__setattr__(settings, "life", 0)


SPLIT = Shape(4, 2, 0, "esgd")


@pytest.mark.mpi
def test_clients_in_step_take_the_newest_that_all_have(pools: Pools, tmp_path: Any) -> None:
    folder, pool = str(tmp_path), pools.get(SPLIT)
    whole = pool.run(run_split, folder)
    newest = entries(folder_of(folder, 1))[0]
    os.truncate(newest.path, 1000)
    places = pool.run(place, folder)
    assert places == [(2, 0)] * 4
    resumed = pool.run(run_split, folder)
    assert [r.seen[0] for r in resumed] == [(2, 0)] * 4
    assert [r.weights for r in resumed] == [w.weights for w in whole]


def run_split(folder: str) -> Any:
    return run(folder, interval=4)


def place(folder: str) -> Any:
    _, _, state, _ = make(folder, interval=4)
    state.load()
    return state.epoch, state.batch


def test_a_loop_that_is_over_does_nothing(tmp_path: Any) -> None:
    first = run(str(tmp_path))
    with open(entries(folder_of(str(tmp_path), 0))[0].path, "rb") as file:
        (own,) = read(file.read(), "the last").ranks
    assert own["start"] is None, "random numbers of an epoch that is over are not gone back to"
    again = run(str(tmp_path))
    assert first is not None and again is not None
    assert again == Outcome(first.weights, [], first.statistics)
