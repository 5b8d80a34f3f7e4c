"""What ranks say when one of them never comes, has left, or makes another collective."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Dict, Iterator

import numpy as np
import pytest

from gluon_esgd.collectives import plan
from gluon_esgd.errors import CollectiveError, StallError

from ..pool import Ended, Shape, run_once
from .expectations import on_nodes

STALLS = (("GLUON_ESGD_STALL_WARNING_S", "1"), ("GLUON_ESGD_STALL_ABORT_S", "3"))
SEEN_TO_LEAVE = (("GLUON_ESGD_STALL_ABORT_S", "20"),)
ONE_NODE_OF = ("shared", "hierarchical", "ring", "library")


def _prepared(algorithm: str) -> Callable[[str], None]:
    from gluon_esgd import world

    return plan("allreduce", np.ones(1000, np.float32), world().comm, algorithm=algorithm)


def _the_last_never_comes(algorithm: str) -> None:
    from gluon_esgd import world

    made = _prepared(algorithm)
    if world().rank == world().size - 1:
        threading.Event().wait(40)  # until the others end the job
    try:
        made("the sum of a test")
    except StallError as error:
        print(f"told: {error}\n", end="", flush=True)  # in one piece, unlike a traceback
        raise


def _the_last_leaves(algorithm: str) -> None:
    from gluon_esgd import world

    made = _prepared(algorithm)
    if world().rank != world().size - 1:
        made("the sum of a test")


def _the_last_makes_another(algorithm: str) -> None:
    """All say what they are told, then try again."""
    from gluon_esgd import world

    comm, made = world().comm, _prepared(algorithm)
    last = comm.rank == comm.size - 1
    for _ in range(2):
        try:
            if last:
                comm.barrier("the end of a test")
            else:
                made("the sum of a test")
        except CollectiveError as error:
            print(f"told: {error}\n", end="", flush=True)
    print(f"rank {comm.rank} is broken: {comm.broken}\n", end="", flush=True)


def _each_says_another_name(algorithm: str) -> None:
    """All send what fits together, so that only the names can tell."""
    from gluon_esgd import world

    made = _prepared(algorithm)
    try:
        made("the first sum" if world().rank == 0 else "the second sum")
    except CollectiveError as error:
        print(f"told: {error}\n", end="", flush=True)


def _jobs(pool: ThreadPoolExecutor) -> Dict[str, Future[Ended]]:
    def start(settings: tuple, function: Callable, algorithm: str, *nodes: int) -> Future:
        nodes_too = on_nodes(*nodes).settings if nodes else ()
        shape = Shape(sum(nodes) or 3, settings=(*settings, *nodes_too))
        return pool.submit(run_once, shape, function, algorithm, timeout=60)

    jobs = {f"stall {name}": start(STALLS, _the_last_never_comes, name) for name in ONE_NODE_OF}
    jobs["stall nodes"] = start(STALLS, _the_last_never_comes, "hierarchical", 2, 2)
    for name in ONE_NODE_OF:
        jobs[f"left {name}"] = start(SEEN_TO_LEAVE, _the_last_leaves, name)
        jobs[f"apart {name}"] = start(SEEN_TO_LEAVE, _the_last_makes_another, name)
        jobs[f"named {name}"] = start(SEEN_TO_LEAVE, _each_says_another_name, name)
    return jobs


@pytest.fixture(scope="module")
def ended() -> Iterator[Callable[[str], Ended]]:
    """How jobs ended that were all started at once, as they mostly wait."""
    with ThreadPoolExecutor(5) as pool:
        jobs = _jobs(pool)
        yield lambda name: jobs[name].result(100)


Endings = Callable[[str], Ended]


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ONE_NODE_OF)
def test_a_rank_that_never_comes_is_named_by_all(ended: Endings, algorithm: str) -> None:
    code, output, _ = ended(f"stall {algorithm}")
    assert code != 0
    for rank in (0, 1):
        waits = f"rank {rank} of 3 waits in the sum of a test; "
        missing = waits + "on this node rank(s) [2] have not come to it; "
        assert missing + "waited 1 s so far" in output
        assert f"told: {missing}gave up after 3 s" in output


@pytest.mark.mpi
def test_a_rank_of_another_node_that_never_comes(ended: Endings) -> None:
    code, output, _ = ended("stall nodes")
    assert code != 0
    on_its_node = "rank 2 of 4 waits in the sum of a test; on this node rank(s) [3] have not come"
    assert f"told: {on_its_node}" in output
    for rank in (0, 1):
        elsewhere = f"rank {rank} of 4 waits in the sum of a test; on other nodes rank(s) [3] have"
        assert f"told: {elsewhere} not come to it" in output


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ONE_NODE_OF)
def test_a_rank_that_has_left_is_named_and_not_waited_for(ended: Endings, algorithm: str) -> None:
    code, output, seconds = ended(f"left {algorithm}")
    assert code != 0 and seconds < 20
    assert "waits in the sum of a test, but rank(s) [2] have left" in output
    assert "StallError" not in output


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ONE_NODE_OF)
def test_a_rank_that_makes_another_collective(ended: Endings, algorithm: str) -> None:
    code, output, seconds = ended(f"apart {algorithm}")
    assert code != 0 and seconds < 20
    told = [line for line in output.splitlines() if line.startswith("told: ")]
    apart = [line for line in told if "the ranks are out of step" in line]
    for rank in range(3):
        mine = [line for line in apart if f"out of step: rank {rank} is in " in line]
        assert len(mine) == 1, told
        assert "the sum of a test" in mine[0] and "the end of a test" in mine[0]
        assert f"told: rank {rank}: an earlier collective failed" in told
        assert f"rank {rank} is broken: True" in output


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ONE_NODE_OF)
def test_collectives_of_other_names_are_not_paired(ended: Endings, algorithm: str) -> None:
    code, output, seconds = ended(f"named {algorithm}")
    assert code != 0 and seconds < 20
    for rank, name in enumerate(("the first sum", "the second sum", "the second sum")):
        assert f"told: the ranks are out of step: rank {rank} is in {name}, " in output


def _plans_in_another_order() -> None:
    """Two of one size, without names of their own."""
    from gluon_esgd import world

    comm = world().comm
    plans = [plan("allreduce", np.ones(100, np.float32), comm) for _ in range(2)]
    for made in plans if comm.rank else plans[::-1]:
        made()


@pytest.mark.mpi
def test_plans_without_names_in_another_order_are_not_paired() -> None:
    ended = run_once(Shape(2, settings=SEEN_TO_LEAVE), _plans_in_another_order)
    assert ended.code != 0
    assert "rank 0 is in an allreduce of float32 of shape (100,), plan 2" in ended.output
