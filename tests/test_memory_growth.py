"""Long runs, and many trainers in one process, take no more memory than short runs and few."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any, Dict, List

import pytest

from gluon_esgd.center.given_up import close_given_up
from gluon_esgd.launch.proc import descendants
from gluon_esgd.rounds import ClientRounds
from gluon_esgd.topology import World

from .pool import Pools, Shape, label
from .training.problems import batches, make_trainer, network, train_step

WARM, MADE = 8, 50
# Arrays are counted as objects; what MXNet itself would keep shows here. Freed memory stays with
# the allocator, some hundred kilobytes of a small network.
KB_OF_ALL = 2000
KB_IN_A_HALF = 500  # 1000 steps: half a kilobyte each; allocators settle with a tenth of it


def make_and_drop(count: int) -> None:
    x, y = batches(2)
    for number in range(count):
        net = network()
        trainer = make_trainer(net)
        for i in range(2):
            train_step(net, trainer, x[i], y[i])
        trainer.finish()  # one that has not finished is kept: it has a last exchange to make
        if number % 8 == 0:  # a collection takes longer than all the rest
            gc.collect()


def held() -> Dict[str, int]:
    """What this process holds, of all that a trainer takes."""
    gc.collect()
    modules = [getattr(type(thing), "__module__", None) for thing in gc.get_objects()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return {
        "objects": sum(
            isinstance(m, str) and m.startswith(("gluon_esgd", "mxnet")) for m in modules
        ),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mailboxes": sum("memfd:gluon-esgd-mailbox" in line for line in mapped),
        "mappings": len(mapped),
        "KB": resident(os.getpid()),
    }


def resident(pid: int) -> int:
    """Kilobytes in memory; 0 where the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)


def make_many() -> List[Dict[str, int]]:
    make_and_drop(WARM - 1)
    gc.collect()
    make_and_drop(1)
    before = held()
    make_and_drop(MADE - 1)
    gc.collect()
    make_and_drop(1)  # by which the boxes of those before are closed
    return [before, held()]


def assert_level(before: Dict[str, int], after: Dict[str, int]) -> None:
    grown = {name: after[name] - before[name] for name in before}
    # One thing of each trainer would be 50.
    assert all(grown[name] <= 10 for name in grown if name != "KB"), grown
    assert grown["KB"] < KB_OF_ALL, grown


def test_trainers_of_one_process_leave_nothing() -> None:
    assert_level(*make_many())


SHAPES = [
    pytest.param(Shape(2), marks=pytest.mark.mpi),
    pytest.param(Shape(2, 2, 1, "esgd"), marks=pytest.mark.servers),
]


@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_trainers_of_ranks_leave_nothing(pools: Pools, shape: Shape) -> None:
    for before, after in pools.get(shape).run(make_many, timeout=100):
        assert_level(before, after)


class FakeLink:
    num_servers, compression = 1, None

    def __init__(self) -> None:
        self.open: List[str] = []

    def attach(self, name: str, *args: Any) -> Any:
        self.open.append(name)
        return FakeBox(self, name)


class FakeBox:
    bytes_moved = 0

    def __init__(self, link: FakeLink, name: str) -> None:
        self.link, self.name = link, name

    def close(self) -> None:
        self.link.open.remove(self.name)


def test_boxes_of_rounds_are_closed_when_the_rounds_are_gone() -> None:
    link: Any = FakeLink()
    rounds = ClientRounds(World(num_clients=2), link, "trainer0")
    rounds.lay([8, 8])
    rounds.lay([8])
    close_given_up()
    assert link.open == ["trainer0.gradients2"]
    del rounds
    assert link.open == ["trainer0.gradients2"]  # the collector may run anywhere
    close_given_up()
    assert link.open == []


_kept: Dict[str, Any] = {}


def train_on(steps: int) -> int:
    """Train with one trainer from call to call; return the objects that Python knows then."""
    if not _kept:
        _kept["net"] = network()
        _kept["trainer"] = make_trainer(_kept["net"], rule="esgd", interval=10, lazy=1)
    x, y = batches()
    for i in range(steps):
        train_step(_kept["net"], _kept["trainer"], x[i % 20], y[i % 20])
    with _kept["trainer"].center():
        gc.collect()
    assert _kept["trainer"].counters.exchanges > 0.9 * steps / 10
    return len(gc.get_objects())


def finish() -> None:
    _kept["trainer"].finish()
    _kept.clear()


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(2, 2, 1, "esgd")], ids=label)
def test_a_long_run_levels_off(pools: Pools, shape: Shape) -> None:
    """2,000 steps, 200 exchanges; ranks, agents, servers and the launcher are looked at."""
    pool = pools.get(shape)
    objects, sizes = [], []
    for _ in range(2):
        objects.append(pool.run(train_on, 1000, timeout=100))
        processes = [pool.process.pid, *descendants(pool.process.pid)]
        sizes.append({pid: resident(pid) for pid in processes})
    pool.run(finish)
    assert len(sizes[1]) >= 9  # launcher, scheduler, server; and of 2 clients rank, zygote, agent
    grown = {pid: size - sizes[0].get(pid, 0) for pid, size in sizes[1].items()}
    assert max(grown.values()) < KB_IN_A_HALF, grown
    assert all(late - early < 500 for early, late in zip(*objects)), objects
