"""Shares of memory at one rank; several ranks are in test_shared_memory.py."""

from __future__ import annotations

import mmap

from gluon_esgd.collectives.memory import share, window
from gluon_esgd.communicator import Communicator


def test_one_rank_shares_memory_with_itself() -> None:
    comm = Communicator()
    first, second = share(10, comm), share(2 * mmap.PAGESIZE, comm)
    assert first is not None and second is not None
    assert [len(part) for part in first.parts] == [mmap.PAGESIZE]
    assert [len(part) for part in second.parts] == [2 * mmap.PAGESIZE]
    assert first.own == second.own == 0
    first.parts[0][:] = 1
    assert first.parts[0].all() and not second.parts[0].any()
    nothing = share(0, comm)
    assert nothing is not None and len(nothing.parts[0]) == mmap.PAGESIZE


def test_a_communicator_has_one_window() -> None:
    comm = Communicator()
    assert window(100, comm) is window(100, comm) is not None
