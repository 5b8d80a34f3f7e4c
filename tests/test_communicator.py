"""Waits have limits, say who is missing, and leave the core to others."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest

from gluon_esgd.communicator import Communicator, Limits, wait_until
from gluon_esgd.errors import CollectiveError, StallError
from gluon_esgd.roll_call import RollCall

from .pool import Pools, Shape


def _nothing(soon: bool) -> None:
    return None


class _Never:
    """A request that never completes, of a communicator that is not there."""

    rank, size = 0, 3

    def Test(self) -> bool:
        return False


def _rolls(ranks: int = 3) -> List[RollCall]:
    """What the ranks of one node see of each other."""
    rows = RollCall.table(ranks)
    return [RollCall(rows, range(ranks), row) for row in range(ranks)]


def test_a_wait_that_is_over_asks_once() -> None:
    asked: List[int] = []
    wait_until(lambda: asked.append(1) or True, Limits(), str, _nothing)
    assert asked == [1]


def test_a_wait_yields_the_core() -> None:
    end = time.monotonic() + 0.3
    used = time.process_time()
    wait_until(lambda: time.monotonic() > end, Limits(), str, _nothing)
    assert time.process_time() - used < 0.15


def test_a_long_wait_is_reported_at_growing_distances_then_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soon: List[bool] = []
    limits = Limits(warning_s=0.3, abort_s=2.5)
    with caplog.at_level(logging.WARNING), pytest.raises(StallError, match="who; gave up after"):
        wait_until(lambda: False, limits, lambda: "who", soon.append)
    at = [record.created for record in caplog.records]
    assert 2 <= len(at) <= 3 and all("who; waited" in r.message for r in caplog.records)
    assert at[1] - at[0] > 0.3 and (len(at) == 2 or at[2] - at[1] > 1.5 * (at[1] - at[0]))
    assert soon[0] and soon[-1], "ranks of other machines are asked before each report"


def test_roll_call_names_who_has_not_come() -> None:
    rolls = _rolls()
    assert rolls[0].missing() == []
    rolls[0].enter("a step")
    assert rolls[0].missing() == [1, 2]
    rolls[2].enter("a step")
    assert rolls[0].missing() == [1] and rolls[0].gone() == []
    rolls[1].leave()
    assert rolls[0].gone() == [1]
    rolls[0].leave()  # at the end all meet once more
    assert rolls[0].gone() == []


def test_roll_call_names_who_has_come_to_something_else() -> None:
    rolls = _rolls()
    for roll in rolls:
        roll.enter("a step")
    assert rolls[0].others() == {}
    rolls[0].enter("a step")
    rolls[1].enter("a center")
    assert rolls[0].others() == {1: "a center"} and rolls[1].others() == {0: "a step"}
    for _ in range(50):  # who is far ahead has forgotten, and is not accused
        rolls[1].enter("a step")
    assert rolls[0].others() == {}


class _Moving:
    """Rows that change right behind the first look at one of their columns."""

    def __init__(self, rows: np.ndarray, move: Callable[[], None]) -> None:
        self._rows, self._moves = rows, [move]

    def __getitem__(self, key: Any) -> Any:
        seen = self._rows[key]
        if isinstance(key, str):
            seen = seen.copy()
            while self._moves:
                self._moves.pop()()
        return seen


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 20])
def test_nobody_is_accused_while_ranks_write(steps: int) -> None:
    rolls = _rolls(2)
    for roll in rolls:
        for i in range(10):
            roll.enter(f"step {i}")
    rolls[0].enter("step 10")

    def move() -> None:
        for i in range(10, 10 + steps):
            rolls[1].enter(f"step {i}")

    rolls[0]._rows = _Moving(rolls[0]._rows, move)  # type: ignore[assignment]
    assert rolls[0].others() == {}


def test_the_report_of_a_stall_names_ranks_and_closes_the_communicator() -> None:
    never, roll = _Never(), _rolls()[0]
    comm = Communicator(never, roll, Limits(warning_s=9, abort_s=0.3))
    comm.enter("a test")
    with pytest.raises(StallError, match=r"rank 0 of 3 waits in a test; on this node rank\(s\) "):
        comm.wait([never], "a test")
    assert comm.broken
    with pytest.raises(CollectiveError, match="an earlier collective failed"):
        comm.enter("a test")


class _Elsewhere:
    """An inquiry of which the answer is known."""

    def attend(self) -> None:
        return None

    def ask(self) -> None:
        return None

    def missing(self, here: int) -> Tuple[List[int], List[int]]:
        return ([1], [2]) if here == 1 else ([], [])


def test_ranks_of_other_nodes_are_named() -> None:
    never, roll, elsewhere = _Never(), _rolls(1)[0], _Elsewhere()
    nodes, limits = [[0], [1], [2]], Limits(warning_s=9, abort_s=0.3)
    comm = Communicator(never, roll, limits, nodes=nodes, inquiry=elsewhere)  # type: ignore
    comm.enter("a test")
    behind = r"in a test; on other nodes rank\(s\) \[1\] have not come to it; "
    silent = r"on other nodes rank\(s\) \[2\] do not answer; gave up"
    with pytest.raises(StallError, match=behind + silent):
        comm.wait([never], "a test")


def test_who_has_left_is_not_waited_for() -> None:
    never, rolls = _Never(), _rolls()
    rolls[2].leave()
    comm = Communicator(never, rolls[0], Limits(warning_s=60))
    comm.enter("a test")
    with pytest.raises(CollectiveError, match=r"but rank\(s\) \[2\] have left"):
        comm.wait([never], "a test")


@pytest.mark.parametrize("answers", [True, False])
def test_ranks_out_of_step_are_an_error_even_where_mpi_paired_them(answers: bool) -> None:
    request, rolls = _Never(), _rolls()
    request.Ibarrier = lambda: request  # type: ignore[attr-defined]
    request.Test = lambda: answers  # type: ignore[method-assign]
    comm = Communicator(request, rolls[0], Limits(warning_s=60))
    rolls[1].enter("the status of an exchange")
    said = "out of step: rank 0 is in gradient bucket 0, rank 1 in the status of an exchange"
    with pytest.raises(CollectiveError, match=said):
        comm.barrier("gradient bucket 0")
    assert comm.broken


def test_ranks_that_wait_for_each_other_in_two_places_are_out_of_step() -> None:
    never, engine, main = _Never(), _rolls(), _rolls()
    comm = Communicator(never, engine[0], Limits(warning_s=60))
    comm.beside = Communicator(never, main[0], Limits(warning_s=60))
    comm.enter("gradient bucket 0")
    main[1].enter("the end", idle=False)  # its engine still has something to do: it will come
    assert main[0].ahead(engine[0].missing()) == {}
    main[1].enter("the end", idle=True)
    with pytest.raises(CollectiveError, match="rank 0 is in gradient bucket 0, rank 1 in the end"):
        comm.wait([never], "gradient bucket 0")


def test_ranks_are_together_where_all_have_come_as_far() -> None:
    rolls = _rolls()
    assert all(roll.together() for roll in rolls), "nobody has gone anywhere"
    rolls[0].advance()
    assert not rolls[0].together() and rolls[1].together() and rolls[2].together()
    rolls[1].advance()
    assert not rolls[0].together() and not rolls[1].together()
    rolls[2].advance()
    assert all(roll.together() for roll in rolls)
    rolls[1].advance()  # who is ahead is there too
    assert rolls[0].together() and not rolls[1].together() and rolls[2].together()


def test_who_has_not_come_to_a_meeting_inside_a_collective_is_missing() -> None:
    rolls = _rolls()
    for roll in rolls:
        roll.enter("a step")
    assert rolls[0].missing() == []
    rolls[0].advance()
    rolls[2].advance()
    assert rolls[0].missing() == [1] and rolls[1].missing() == []
    rolls[1].leave()
    assert rolls[0].gone() == [1]


def test_ranks_are_alike_where_all_have_come_to_the_same() -> None:
    rolls = _rolls()
    for number in range(20):  # beyond the names that are kept
        for roll in rolls:
            roll.enter(f"step {number}")
        assert all(roll.alike() for roll in rolls)
    for roll, name in zip(rolls, ("a step", "a center", "a step")):
        roll.enter(name)
    assert not any(roll.alike() for roll in rolls)
    assert rolls[0].others() == {1: "a center"}
    for roll in rolls:
        roll.enter("a step")
    assert all(roll.alike() for roll in rolls), "each collective is compared for itself"


def test_long_names_are_cut_and_compared_by_what_is_kept() -> None:
    rolls = _rolls(2)
    for roll, end in zip(rolls, "ab"):
        roll.enter("x" * 500 + end)
    assert rolls[0].alike() and rolls[0].others() == {}
    for roll, name in zip(rolls, ("ü" * 200, "short")):
        roll.enter(name)
    assert not rolls[0].alike() and rolls[0].others() == {1: "short"}


def _pair(**limits: Any) -> Tuple[Communicator, RollCall]:
    """Rank 0 of two on one machine, and what rank 1 writes."""
    mine, other = _rolls(2)
    never = _Never()
    never.size = 2
    return Communicator(never, mine, Limits(**limits), nodes=[[0, 1]]), other


def test_a_meeting_is_over_when_the_others_have_come() -> None:
    comm, other = _pair(abort_s=0.3)
    other.enter("a test")
    other.advance()
    comm.arrive("a test")
    with pytest.raises(StallError, match=r"rank 0 of 2 waits in a test; on this node rank\(s\) "):
        comm.meet("a test")
    assert comm.broken


def test_a_meeting_of_ranks_in_different_collectives_is_an_error() -> None:
    comm, other = _pair(abort_s=30)
    other.enter("the end")
    other.advance()
    with pytest.raises(CollectiveError, match="rank 0 is in a test, rank 1 in the end"):
        comm.arrive("a test")
    assert comm.broken
    with pytest.raises(CollectiveError, match="rank 0: an earlier collective failed"):
        comm.arrive("a test")


def test_where_each_stands_for_a_client_messages_speak_of_clients() -> None:
    mine, other = _rolls(2)
    never = _Never()
    never.size = 2
    limits = Limits(warning_s=9, abort_s=0.3)
    comm = Communicator(never, mine, limits, nodes=[[0, 1]], member="client")
    comm.enter("a test")
    says = r"client 0 of 2 waits in a test; on this node client\(s\) \[1\] have not come to it"
    with pytest.raises(StallError, match=says):
        comm.wait([never], "a test")
    comm.broken = False
    other.leave()
    with pytest.raises(CollectiveError, match=r"but client\(s\) \[1\] have left"):
        comm.wait([never], "a test")
    comm.broken = False
    other.enter("the end")
    with pytest.raises(CollectiveError, match="the clients are out of step: client 0 is in a test"):
        comm.check_same("a test")
    with pytest.raises(CollectiveError, match="client 0: an earlier collective failed"):
        comm.enter("a test")


def test_one_rank_of_a_machine_meets_nobody() -> None:
    comm = Communicator(limits=Limits(abort_s=0.1))
    comm.arrive("a test")
    comm.meet("a test")
    assert (comm.local_size, comm.nodes, comm.peers) == (1, [[0]], None)


def _wanted_s() -> float:
    """Seconds in which this thread had or wanted a core: on a busy machine it waits for one."""
    ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran) + int(queued)) / 1e9


def test_a_rank_that_spins_keeps_its_core() -> None:
    start, wanted = time.monotonic(), _wanted_s()
    wait_until(lambda: time.monotonic() > start + 0.3, Limits(spin=True), str, _nothing)
    assert _wanted_s() - wanted > 0.8 * (time.monotonic() - start)


def _wait_for_a_late_rank(seconds: float, algorithm: str) -> Tuple[float, float, float]:
    """How long this rank was in a collective to which the last one comes late, and its core."""
    from gluon_esgd import world
    from gluon_esgd.collectives import plan

    comm = world().comm
    made = plan("allreduce", np.ones(1000, np.float32), comm, algorithm=algorithm)
    made()
    if comm.rank == comm.size - 1:
        threading.Event().wait(seconds)
    start, used, wanted = time.monotonic(), time.process_time(), _wanted_s()
    made()
    return time.monotonic() - start, time.process_time() - used, _wanted_s() - wanted


@pytest.mark.mpi
@pytest.mark.parametrize("wait", ["back-off", "spin"])
@pytest.mark.parametrize("algorithm", ["shared", "library", "ring"])
def test_waiting_takes_a_core_only_where_asked_for(pools: Pools, wait: str, algorithm: str) -> None:
    pool = pools.get(Shape(2, settings=(("GLUON_ESGD_WAIT", wait),)))
    waited, used, wanted = pool.run(_wait_for_a_late_rank, 1.0, algorithm)[0]
    assert waited > 0.9
    if wait == "spin":
        assert wanted > 0.8 * waited
    else:
        assert used < 0.15 * waited and wanted < 0.7 * waited


def _long_wait() -> List[str]:
    """What is logged on this rank while the last one is late."""
    from gluon_esgd import world

    said: List[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gluon_esgd.communicator")
    logger.addHandler(handler)
    try:
        _wait_for_a_late_rank(1.5, "shared")
        world().comm.barrier("another test")
    finally:
        logger.removeHandler(handler)
    return said


@pytest.mark.mpi
def test_a_wait_that_ends_well_is_reported_behind_the_limit(pools: Pools) -> None:
    pool = pools.get(Shape(3, settings=(("GLUON_ESGD_STALL_WARNING_S", "0.5"),)))
    where, missing = (
        "of 3 waits in an allreduce of float32 of shape (1000,), plan ",
        ("; on this node rank(s) [2] have not come to it; waited"),
    )
    *waiting, last = pool.run(_long_wait)
    assert last == []
    for rank, said in enumerate(waiting):
        assert 1 <= len(said) <= 2
        assert all(f"rank {rank} {where}" in line and missing in line for line in said)


def test_one_rank_needs_no_mpi() -> None:
    comm = Communicator()
    array = np.arange(3.0)
    comm.broadcast(array, "a test")
    comm.barrier()
    assert comm.allgather({"a": (1, 2)}) == [{"a": [1, 2]}] and array.tolist() == [0, 1, 2]
