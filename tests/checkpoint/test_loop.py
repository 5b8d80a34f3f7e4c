"""What the loop does between checkpoints: decides together, leaves out what was done."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, List

import pytest
from mxnet import gluon

from gluon_esgd.checkpoint import TrainingState
from gluon_esgd.checkpoint.arguments import checked_folder

from ..pool import Pools, Shape
from ..training.problems import train_step
from .loops import make, positions, weights

TWO = pytest.mark.parametrize("shape", [pytest.param(Shape(2), marks=pytest.mark.mpi)])


def saved_by_the_clock(folder: str) -> List[Any]:
    from gluon_esgd import world

    _net, _trainer, state, _ = outcome = make(folder, every_s=1e9)
    decisions, clock = state._decisions, state._decisions.saved_at
    for epoch in state.epochs(1):
        for i, (x, y) in enumerate(state.batches(outcome[3])):
            if i == 2 and world().rank == 0:
                decisions.saved_at = clock - 2e9  # it is time on the leader, and nowhere else
            train_step(outcome[0], outcome[1], x.asnumpy(), y.asnumpy())
        assert epoch == 0
    return positions(folder)


@TWO
def test_the_leaders_clock_says_when_to_save(pools: Pools, shape: Shape, tmp_path: Any) -> None:
    found = pools.get(shape).run(saved_by_the_clock, str(tmp_path))
    assert found == [[(1, 0), (0, 4)]] * 2, "one step after it was time"


def uneven(folder: str) -> Any:
    """Rank 1 has two batches and then steps without, as `join` makes them; SIGTERM on rank 0."""
    from gluon_esgd import world

    net, trainer, state, loader = make(folder)
    batches = list(loader)
    mine, rank = batches[: 6 if world().rank == 0 else 2], world().rank
    try:
        for _ in state.epochs(1):
            for i, (x, y) in enumerate(state.batches(mine)):
                if rank == 0 and i == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                train_step(net, trainer, x.asnumpy(), y.asnumpy())
            for x, y in batches[len(mine) :]:
                train_step(net, trainer, x.asnumpy(), y.asnumpy())
    except SystemExit as left:
        code, steps, found = left.code, trainer.counters.steps, weights(net)
        _, _, state, _ = make(folder)
        state.load()
        return code, steps, found, state.batch
    return None


@TWO
def test_ranks_without_batches_leave_with_the_others(
    pools: Pools, shape: Shape, tmp_path: Any
) -> None:
    first, second = pools.get(shape).run(uneven, str(tmp_path))
    assert first[:3] == second[:3] and first[:2] == (143, 5)
    assert (first[3], second[3]) == (5, 2), "each goes on after what it has done"
    assert positions(str(tmp_path)) == [(0, 5)]


def another_loop(folder: str) -> str:
    from gluon_esgd import world

    _, _, state, _ = make(folder, every_steps=3 + world().rank)
    with pytest.raises(ValueError) as error:
        next(state.epochs(2))
    return str(error.value)


@TWO
def test_ranks_with_other_settings_are_told(pools: Pools, shape: Shape, tmp_path: Any) -> None:
    text = "setting of the loop 1 differs: rank 0 has every_steps 3, rank 1 has every_steps 4"
    assert all(text in said for said in pools.get(shape).run(another_loop, str(tmp_path)))


class Watched(gluon.data.Dataset):
    """Remembers what was asked for."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.asked: List[int] = []

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self._data[index]


@pytest.mark.parametrize("wrapped", [False, True], ids=["DataLoader", "anything"])
def test_batches_that_were_done_are_left_out(wrapped: bool, tmp_path: Any) -> None:
    seen: List[Any] = []
    for life in range(2):
        net, trainer, state, loader = make(str(tmp_path), every_steps=1)
        data = Watched(loader._dataset)
        loader = gluon.data.DataLoader(data, 4, sampler=state._sampler)
        batches = map(tuple, loader) if wrapped else loader
        for _ in state.epochs(1):
            for x, y in state.batches(batches):
                seen.append(x.asnumpy().sum())
                train_step(net, trainer, x.asnumpy(), y.asnumpy())
                if life == 0 and len(seen) == 6:
                    break
            if life == 0:
                break
        assert life == 0 or len(data.asked) == (48 if wrapped else 28)
    # The sixth was not over when its life ended.
    assert len(seen) == 6 + 7 and seen[5] == seen[6] and len(set(seen)) == 12


def test_a_worker_of_a_loader_can_still_be_ended(tmp_path: Any) -> None:
    _, _, state, _ = make(str(tmp_path))
    for _ in state.epochs(1):
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        os.kill(pid, signal.SIGTERM)
        limit, ended = time.monotonic() + 20, (0, 0)
        while ended == (0, 0) and time.monotonic() < limit:
            ended = os.waitpid(pid, os.WNOHANG)
        if ended == (0, 0):
            os.kill(pid, signal.SIGKILL)
        assert ended == (pid, signal.SIGTERM)
    assert not state._decisions.signal.came


def test_wrong_arguments_are_named(tmp_path: Any) -> None:
    net, trainer, state, _ = make(str(tmp_path))
    for wrong, error, text in [
        ({"keep": 0}, ValueError, "keep=0 must be at least 1"),
        ({"keep": 1.5}, TypeError, r"keep=1\.5 must be an integer"),
        ({"every_steps": True}, TypeError, "every_steps=True must be an integer"),
        ({"every_s": 0}, ValueError, "every_s=0 must be above 0"),
        ({"every_s": "1"}, TypeError, "every_s='1' must be a number of seconds"),
        ({"folder": None}, ValueError, "folder=None: this job was not started by `gluon-esgd run`"),
    ]:
        with pytest.raises(error, match=text):
            TrainingState(net, trainer, **{"folder": str(tmp_path), **wrong})
    with pytest.raises(TypeError, match="trainer=Trainer must be an ElasticTrainer"):
        TrainingState(net, gluon.Trainer(net.collect_params(), "sgd"), folder=str(tmp_path))
    with pytest.raises(ValueError, match="epochs=-1 must be at least 0"):
        next(state.epochs(-1))
    assert checked_folder(None, "/a/job") == "/a/job/checkpoints"


def test_without_batches_sigterm_is_heard_at_the_end_of_the_epoch(tmp_path: Any) -> None:
    _, _, state, _ = make(str(tmp_path))
    with pytest.raises(SystemExit) as left:
        for _ in state.epochs(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 143 and positions(str(tmp_path)) == [(1, 0)]


def test_one_pass_in_each_epoch(tmp_path: Any) -> None:
    _, _, state, loader = make(str(tmp_path))
    for _ in state.epochs(1):
        list(state.batches(loader))
        with pytest.raises(RuntimeError, match=r"batches\(\) counts one pass in each epoch"):
            next(state.batches(loader))
