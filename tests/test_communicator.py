"""Waits have limits and say who is missing; no MPI needed to see it."""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, List

import numpy as np
import pytest

from gluon_esgd.communicator import Communicator, Limits, wait_until
from gluon_esgd.errors import CollectiveError, StallError
from gluon_esgd.roll_call import RollCall


def _nothing() -> None:
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


def test_a_long_wait_is_reported_once_then_ends(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(warning_s=0.2, abort_s=0.9)
    with caplog.at_level(logging.WARNING), pytest.raises(StallError, match="who; gave up after"):
        wait_until(lambda: False, limits, lambda: "who", _nothing)
    assert ["who; waited" in r.message for r in caplog.records] == [True]


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


def test_a_rank_of_another_node_is_missing_namelessly() -> None:
    never, roll = _Never(), _rolls(1)[0]
    comm = Communicator(never, roll, Limits(warning_s=9, abort_s=0.3))
    comm.enter("a test")
    with pytest.raises(StallError, match="a rank of another node has not come to it"):
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


def test_one_rank_needs_no_mpi() -> None:
    comm = Communicator()
    array = np.arange(3.0)
    comm.broadcast(array, "a test")
    comm.barrier()
    assert comm.allgather({"a": (1, 2)}) == [{"a": [1, 2]}] and array.tolist() == [0, 1, 2]
