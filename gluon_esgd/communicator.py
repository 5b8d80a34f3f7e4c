"""A communicator whose every wait has a limit and says who is missing.

A communicator of one rank needs no MPI and is the same type.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from .errors import CollectiveError, StallError

__all__ = ["Communicator", "Limits", "RollCall", "wait_until"]

_log = logging.getLogger(__name__)

_SPIN_S = 100e-6  # about one hand-over between cores; a sleep costs as much
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 500e-6
_LOOK_EVERY_S = 0.2  # how often a waiting rank looks whether another one has left


@dataclass(frozen=True)
class Limits:
    """When a wait is reported (seconds), and when it ends the job (None: never)."""

    warning_s: float = 60.0
    abort_s: Optional[float] = None


def wait_until(
    done: Callable[[], Any], limits: Limits, report: Callable[[], str], look: Callable[[], None]
) -> None:
    """Call `done` until it is true: at once, then yielding the core, then with short sleeps.

    Parameters
    ----------
    done : callable
        Asked again and again; it must not block.
    limits : Limits
        After ``warning_s`` `report` is logged once, after ``abort_s`` raised.
    report : callable
        Says what is waited for and who is missing.
    look : callable
        Called a few times a second; raises where waiting on is useless.

    Raises
    ------
    StallError
        On this rank, after ``abort_s``.
    """
    start = time.monotonic()
    sleep_s, looked, warned = _FIRST_SLEEP_S, start, False
    while not done():
        now = time.monotonic()
        if now - start < _SPIN_S:
            os.sched_yield()
            continue
        if now - looked > _LOOK_EVERY_S:
            looked = now
            look()
            if limits.abort_s is not None and now - start > limits.abort_s:
                raise StallError(f"{report()}; gave up after {now - start:.0f} s")
            if not warned and now - start > limits.warning_s:
                warned = True
                _log.warning("%s; waited %.0f s so far", report(), now - start)
        time.sleep(sleep_s)
        sleep_s = min(sleep_s * 1.5, _LONGEST_SLEEP_S)


# Names of collectives that a rank's row keeps: the last so many, cut to so many bytes.
_KEPT, _NAME_BYTES = 8, 120

_ROW = np.dtype(
    [
        ("entered", np.int64),
        ("left", np.int64),
        ("idle", np.int64),
        ("names", f"S{_NAME_BYTES}", (_KEPT,)),
    ]
)


class RollCall:
    """Which ranks of this node have come to which collective, in memory they share.

    Parameters
    ----------
    rows : ndarray, shape (local_size,)
        Of each rank: collectives entered, whether it has come to its end, whether
        its engine was idle when it entered, and the names of the last; see `table`.
    ranks : sequence of int
        The rank in the communicator of each row.
    row : int
        This rank's row.
    """

    def __init__(self, rows: np.ndarray, ranks: Sequence[int], row: int) -> None:
        self._rows, self._ranks, self._row = rows, list(ranks), row

    @staticmethod
    def table(size: int, memory: Optional[mmap.mmap] = None) -> np.ndarray:
        """Return empty rows for `size` ranks, in `memory` where it is given."""
        return np.zeros(size, _ROW) if memory is None else np.frombuffer(memory, _ROW, size)

    @classmethod
    def over(cls, node: Any, rank: int) -> RollCall:
        """Make one for the mpi4py communicator of a node's ranks; collective over them.

        The file behind the memory is unlinked before anyone uses it, so that
        nothing is left behind, however the processes end.
        """
        size = node.size * _ROW.itemsize
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        path = None
        if node.rank == 0:
            handle, path = tempfile.mkstemp(prefix="gluon_esgd_", dir=folder)
            os.ftruncate(handle, size)
        path = node.bcast(path)
        if node.rank != 0:
            handle = os.open(path, os.O_RDWR)
        memory = mmap.mmap(handle, size)
        os.close(handle)
        node.Barrier()
        if node.rank == 0:
            os.unlink(path)
        return cls(cls.table(node.size, memory), node.allgather(rank), node.rank)

    def enter(self, what: str, idle: bool = False) -> None:
        """Say that this rank has come to its next collective, and which it is."""
        mine = self._rows[self._row]
        mine["idle"] = idle
        mine["names"][(mine["entered"] + 1) % _KEPT] = what.encode()[:_NAME_BYTES]
        mine["entered"] += 1

    def leave(self) -> None:
        """Say that this rank has come to its end: it joins no collective but those of the end."""
        self._rows[self._row]["left"] = 1

    def missing(self) -> List[int]:
        """Return the ranks of this node that have not yet come to where this one is."""
        here = self._rows[self._row]["entered"]
        return [r for r, n in zip(self._ranks, self._rows["entered"]) if n < here]

    def gone(self) -> List[int]:
        """Return the missing ranks that have left and so will never come."""
        if self._rows[self._row]["left"]:
            return []  # at the end itself, where all meet once more
        left = {r for r, flag in zip(self._ranks, self._rows["left"]) if flag}
        return [r for r in self.missing() if r in left]

    def others(self) -> Dict[int, str]:
        """Return the ranks that have come to another collective here, and to which."""
        here = int(self._rows[self._row]["entered"])
        slot = here % _KEPT
        mine = self._rows[self._row]["names"][slot]
        entered = self._rows["entered"]
        names = self._rows["names"][:, slot]
        apart = (names != mine) & (entered >= here) & (entered < here + _KEPT)
        return {self._ranks[i]: names[i].decode(errors="replace") for i in np.flatnonzero(apart)}

    def ahead(self, ranks: Sequence[int]) -> Dict[int, str]:
        """Return those of `ranks` that wait here for this one with an idle engine, and in what."""
        here = self._rows[self._row]["entered"]
        found = {}
        for rank, row in zip(self._ranks, self._rows):
            if rank in ranks and row["entered"] > here and row["idle"]:
                found[rank] = row["names"][row["entered"] % _KEPT].decode(errors="replace")
        return found

    def __len__(self) -> int:
        return len(self._ranks)


class Communicator:
    """The ranks that make collectives together; all methods but the properties are collective.

    Parameters
    ----------
    mpi : mpi4py.MPI.Intracomm or None
        A private duplicate; None for a world of one rank.
    roll_call : RollCall or None
    limits : Limits

    Notes
    -----
    MPI calls cannot be cancelled. After a wait has failed, `broken` is True and
    the process must end.
    """

    def __init__(
        self,
        mpi: Any = None,
        roll_call: Optional[RollCall] = None,
        limits: Limits = Limits(),
    ) -> None:
        self.mpi = mpi
        self.rank: int = mpi.rank if mpi is not None else 0
        self.size: int = mpi.size if mpi is not None else 1
        self.limits = limits
        self.broken = False
        # For a rank that waits here in the engine: where its main thread makes collectives,
        # and there: whether the engine has nothing to do.
        self.beside: Optional[Communicator] = None
        self.idle: Callable[[], bool] = lambda: False
        self._abandoned: List[Any] = []
        self._roll_call = roll_call

    def enter(self, what: str) -> None:
        """Note in the roll call that this rank has come to its next collective, `what`.

        The name must be the same on all ranks: ranks of a node that bring
        different ones at the same place in the order are out of step.
        """
        if self.broken:
            raise CollectiveError(f"rank {self.rank}: an earlier collective failed")
        if self._roll_call is not None:
            self._roll_call.enter(what, self.idle())

    def leave(self) -> None:
        """Tell waiting ranks of this node that this one is at its end (not collective)."""
        if self._roll_call is not None:
            self._roll_call.leave()

    def wait(self, requests: Sequence[Any], what: str) -> None:
        """Wait for MPI `requests` of the collective `what`, within the limits."""
        pending = list(requests)

        def done() -> bool:
            while pending and pending[-1].Test():
                pending.pop()
            return not pending

        try:
            wait_until(done, self.limits, lambda: self._report(what), lambda: self._look(what))
        except BaseException:
            self.broken = True
            self._abandoned += requests  # MPI may still write into their buffers
            raise
        self._check_same(what)

    def _report(self, what: str) -> str:
        present, missing = f"rank {self.rank} of {self.size} waits in {what}", []
        if self._roll_call is not None:
            missing = self._roll_call.missing()
        if missing:
            return f"{present}; on this node rank(s) {missing} have not come to it"
        if self._roll_call is None:
            return f"{present}; another rank has not come to it"
        if len(self._roll_call) < self.size:
            return f"{present}; a rank of another node has not come to it"
        return f"{present}; all have come to it"

    def _check_same(self, what: str) -> None:
        others = self._roll_call.others() if self._roll_call is not None else {}
        self._raise_apart(what, others)

    def _raise_apart(self, what: str, others: Dict[int, str]) -> None:
        if others:
            self.broken = True
            said = "; ".join(f"rank {rank} in {name}" for rank, name in others.items())
            raise CollectiveError(
                f"the ranks are out of step: rank {self.rank} is in {what}, {said}; every rank "
                "must make the same calls in the same order (step, center, finish, ...)"
            )

    def _look(self, what: str) -> None:
        self._check_same(what)
        if self._roll_call is None:
            return
        gone = self._roll_call.gone()
        if gone:
            raise CollectiveError(
                f"rank {self.rank} of {self.size} waits in {what}, but rank(s) {gone} have left"
            )
        beside = self.beside._roll_call if self.beside is not None else None
        if beside is not None:
            # Who waits there for this rank, with nothing left to do in its engine, never comes
            # here: in the order of its calls that one is before this one, in ours behind it.
            self._raise_apart(what, beside.ahead(self._roll_call.missing()))

    def barrier(self, what: str = "a barrier") -> None:
        """Return when every rank has come here."""
        self.enter(what)
        if self.size > 1:
            self.wait([self.mpi.Ibarrier()], what)

    def broadcast(self, array: np.ndarray, what: str) -> None:
        """Copy the contiguous `array` of rank 0 into that of every rank, in place."""
        self.enter(what)
        if self.size > 1:
            self.wait([self.mpi.Ibcast(_wire(array), 0)], what)

    def allgather(self, value: Any, what: str = "an exchange of plans") -> List[Any]:
        """Return every rank's `value` in rank order; values are what JSON can say."""
        self.enter(what)
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.wait([self.mpi.Iallgather(np.array([mine.size], np.int64), lengths)], what)
        everything = np.empty(int(lengths.sum()), np.uint8)
        ends = np.cumsum(lengths)
        spans = (lengths.tolist(), (ends - lengths).tolist())
        self.wait([self.mpi.Iallgatherv(mine, [everything, spans, _byte()])], what)
        return [json.loads(everything[end - n : end].tobytes()) for n, end in zip(lengths, ends)]


def _wire(array: np.ndarray) -> np.ndarray:
    """Half floats are unknown to MPI; for moving them their bytes will do."""
    return array.view(np.uint16) if array.dtype == np.float16 else array


def _byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE
