"""Waits have limits and say who is missing; no MPI needed to see it."""

from __future__ import annotations

import logging
import time
from typing import List

import numpy as np
import pytest

from gluon_esgd.communicator import Communicator, Limits, RollCall, wait_until
from gluon_esgd.errors import CollectiveError, StallError


def _nothing() -> None:
    return None


class _Never:
    """A request that never completes, of a communicator that is not there."""

    rank, size = 0, 3

    def Test(self) -> bool:
        return False


def _roll(rows: int = 3, row: int = 0) -> RollCall:
    return RollCall(np.zeros((rows, 2), np.int64), range(rows), row)


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
    roll, other = _roll(), None
    assert roll.missing() == []
    roll.enter()
    assert roll.missing() == [1, 2]
    other = RollCall(roll._slots, range(3), 2)
    other.enter()
    assert roll.missing() == [1] and roll.gone() == []
    RollCall(roll._slots, range(3), 1).leave()
    assert roll.gone() == [1]
    roll.leave()  # at the end all meet once more
    assert roll.gone() == []


def test_the_report_of_a_stall_names_ranks_and_closes_the_communicator() -> None:
    never, roll = _Never(), _roll()
    comm = Communicator(never, roll, Limits(warning_s=9, abort_s=0.3))
    comm.enter()
    with pytest.raises(StallError, match=r"rank 0 of 3 waits in a test; on this node rank\(s\) "):
        comm.wait([never], "a test")
    assert comm.broken
    with pytest.raises(CollectiveError, match="an earlier collective failed"):
        comm.enter()


def test_a_rank_of_another_node_is_missing_namelessly() -> None:
    never, roll = _Never(), _roll(rows=1)
    comm = Communicator(never, roll, Limits(warning_s=9, abort_s=0.3))
    comm.enter()
    with pytest.raises(StallError, match="a rank of another node has not come to it"):
        comm.wait([never], "a test")


def test_who_has_left_is_not_waited_for() -> None:
    never, roll = _Never(), _roll()
    RollCall(roll._slots, range(3), 2).leave()
    comm = Communicator(never, roll, Limits(warning_s=60))
    comm.enter()
    with pytest.raises(CollectiveError, match=r"but rank\(s\) \[2\] have left"):
        comm.wait([never], "a test")


def test_one_rank_needs_no_mpi() -> None:
    comm = Communicator()
    array = np.arange(3.0)
    comm.broadcast(array, "a test")
    comm.barrier()
    assert comm.allgather({"a": (1, 2)}) == [{"a": [1, 2]}] and array.tolist() == [0, 1, 2]
