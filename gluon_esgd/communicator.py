"""A communicator whose every wait has a limit and says who is missing.

A communicator of one rank needs no MPI and is the same type.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from .errors import CollectiveError, StallError
from .inquiry import Inquiry
from .roll_call import RollCall

__all__ = ["Communicator", "Limits", "movable", "wait_until"]

_log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 30  # in one message, of which not every MPI counts more than twice as many
_POLLS = 10  # so often a rank looks for others at a meeting point before it yields its core
_SPIN_S = 100e-6  # about one hand-over between cores; a sleep costs as much
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 500e-6
_LOOK_EVERY_S = 0.2  # how often a waiting rank looks whether another one has left
_ASK_AHEAD_S = 1.0  # before a report ranks of other machines have so long to answer

_HINT = "; a rank that runs out of batches before the others calls trainer.join()"

# There other cores see the stores of one in their order; elsewhere MPI has to see to it.
_STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True)
class Limits:
    """How ranks wait.

    A wait is reported after `warning_s`, again whenever it has lasted twice as long, and ends the
    job after `abort_s` seconds (None: never). With `spin` it never gives up its core.
    """

    warning_s: float = 60.0
    abort_s: Optional[float] = None
    spin: bool = False


def wait_until(
    done: Callable[[], Any],
    limits: Limits,
    report: Callable[[], str],
    look: Callable[[bool], None],
) -> None:
    """Call `done` until it is true: at once, then yielding the core, then with short sleeps.

    Parameters
    ----------
    done : callable
        Asked again and again; it must not block.
    limits : Limits
        After ``warning_s``, and whenever that time has doubled, `report` is logged; after
        ``abort_s`` it is raised.
    report : callable
        Says what is waited for and who is missing.
    look : callable
        Called a few times a second, with whether a report will follow soon; raises where waiting
        on is useless.

    Raises
    ------
    StallError
        On this rank, after ``abort_s``.
    """
    start = time.monotonic()
    end_s = float("inf") if limits.abort_s is None else limits.abort_s
    sleep_s, looked, warn_s = _FIRST_SLEEP_S, start, limits.warning_s
    while not done():
        now = time.monotonic()
        waited = now - start
        if not limits.spin and waited < _SPIN_S:
            os.sched_yield()
            continue
        if now - looked > _LOOK_EVERY_S:
            looked = now
            look(waited > min(warn_s, end_s) - _ASK_AHEAD_S)
            if waited > end_s:
                raise StallError(f"{report()}; gave up after {waited:.0f} s")
            if waited > warn_s:
                warn_s = 2 * waited
                _log.warning("%s; waited %.0f s so far", report(), waited)
        if limits.spin:
            continue
        time.sleep(sleep_s)
        sleep_s = min(sleep_s * 1.5, _LONGEST_SLEEP_S)


class Communicator:
    """The ranks that make collectives together; all methods but the properties are collective.

    Parameters
    ----------
    mpi : mpi4py.MPI.Intracomm or None
        A private duplicate; None for a world of one rank.
    roll_call : RollCall or None
    limits : Limits
    nodes : sequence of sequences of int, optional
        The ranks of each machine, machines in the order of their lowest rank. Unless
        given, every rank has a machine of its own.
    node : mpi4py.MPI.Intracomm or None
        The ranks of this machine.
    peers : Communicator or None
        The ranks that have the same number on other machines as this one here; None where some
        machine has no such rank, and where there is only one machine.
    called : str, optional
        This rank's name in messages, where its number here would not tell.
    member : str, default 'rank'
        What one of them is called in messages: 'client' where each stands for one.

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
        *,
        nodes: Optional[Sequence[Sequence[int]]] = None,
        node: Any = None,
        peers: Optional[Communicator] = None,
        inquiry: Optional[Inquiry] = None,
        called: Optional[str] = None,
        member: str = "rank",
    ) -> None:
        self.mpi = mpi
        self.rank: int = mpi.rank if mpi is not None else 0
        self.size: int = mpi.size if mpi is not None else 1
        self.called, self._member = called or f"{member} {self.rank} of {self.size}", member
        self.limits = limits
        self.nodes = [list(ranks) for ranks in nodes or [[rank] for rank in range(self.size)]]
        self.node_rank = next(k for k, ranks in enumerate(self.nodes) if self.rank in ranks)
        self.local_rank = self.nodes[self.node_rank].index(self.rank)
        self.local_size = len(self.nodes[self.node_rank])
        self.peers = peers
        self.broken = False
        self.plans = 0  # of collectives, made so far; the same on all ranks
        self.sent_bytes = 0  # what this rank has sent in messages of its own collectives
        # For a rank that waits here in the engine: where its main thread makes collectives,
        # and there: whether the engine has nothing to do.
        self.beside: Optional[Communicator] = None
        self.idle: Callable[[], bool] = lambda: False
        self._abandoned: List[Any] = []
        self._roll_call, self._inquiry = roll_call, inquiry
        self._node = node
        self._whole: Communicator = self  # of which this one is a part
        if peers is not None:
            peers._whole = self

    def enter(self, what: str) -> None:
        """Note in the roll call that this rank has come to its next collective, `what`.

        The name must be the same on all ranks: ranks of a node that bring
        different ones at the same place in the order are out of step.
        """
        if self.broken:
            raise CollectiveError(f"{self._member} {self.rank}: an earlier collective failed")
        if self.mpi is not None and not self.mpi:
            raise CollectiveError(
                f"{self._member} {self.rank}: the communicator was freed before {what}"
            )
        if self._roll_call is not None:
            self._roll_call.enter(what, self.idle())

    def leave(self) -> None:
        """Tell waiting ranks of this node that this one is at its end (not collective)."""
        if self._roll_call is not None:
            self._roll_call.leave()
        if self._inquiry is not None and self.mpi:
            self._inquiry.attend()  # so that no message stays behind

    def wait(self, requests: Sequence[Any], what: str, *, under_way: Sequence[Any] = ()) -> None:
        """Wait for MPI `requests` of the collective `what`, within the limits.

        `under_way` are other requests of it: where the wait fails, all are kept with the memory
        into which MPI may still write.
        """
        pending = list(requests)

        def done() -> bool:
            while pending and pending[-1].Test():
                pending.pop()
            return not pending

        try:
            self.wait_for(done, what)
        except BaseException:
            self._abandoned += [*requests, *under_way]
            raise

    def wait_for(self, done: Callable[[], Any], what: str) -> None:
        """Ask `done` until it is true, within the limits; it belongs to the collective `what`."""
        try:
            whole = self._whole
            wait_until(
                done, self.limits, lambda: whole._report(what), lambda soon: whole._look(what, soon)
            )
        except BaseException:
            self.broken = True
            raise

    def arrive(self, what: str) -> None:
        """Come to the collective `what`, and wait for the ranks of this machine; collective.

        What they wrote into shared memory before can be read afterwards.
        """
        self.enter(what)
        self.meet(what)
        self.check_same(what)

    def meet(self, what: str) -> None:
        """Wait inside the collective `what` until all ranks of this machine have come here."""
        if self.local_size == 1:
            return
        if not _STORES_IN_ORDER:
            self.wait([self._node.Ibarrier()], what)
            return
        roll_call = self._roll_call
        assert roll_call is not None
        roll_call.advance()
        for _ in range(_POLLS):
            if roll_call.together():
                return
        self.wait_for(roll_call.together, what)

    def _report(self, what: str) -> str:
        present = f"{self.called} waits in {what}"
        missing: List[int] = [] if self._roll_call is None else self._roll_call.missing()
        elsewhere: List[int] = []
        silent: List[int] = []
        if self._roll_call is not None and self._inquiry is not None:
            elsewhere, silent = self._inquiry.missing(self._roll_call.entered)
        said = [
            f"{where} {self._member}(s) {ranks} {how}"
            for where, ranks, how in (
                ("on this node", missing, "have not come to it"),
                ("on other nodes", elsewhere, "have not come to it"),
                ("on other nodes", silent, "do not answer"),
            )
            if ranks
        ]
        return "; ".join([present, *(said or ["all have come to it"])])

    def check_same(self, what: str) -> None:
        """Raise when a rank of this node has come to another collective here than `what`.

        Once, when a collective is over: until then a long wait looks by itself.
        """
        if self._roll_call is not None and not self._roll_call.alike():
            self._raise_apart(what, self._roll_call.others())

    def _raise_apart(self, what: str, others: Dict[int, str]) -> None:
        if others:
            self.broken = True
            who = self._member
            said = "; ".join(f"{who} {rank} in {name}" for rank, name in others.items())
            raise CollectiveError(
                f"the {who}s are out of step: {who} {self.rank} is in {what}, {said}; every {who} "
                "must make the same calls in the same order (step, center, finish, ...)"
            )

    def _look(self, what: str, soon: bool = False) -> None:
        self.check_same(what)
        if self._roll_call is None:
            return
        if self._inquiry is not None:
            self._inquiry.attend()
            if soon:
                self._inquiry.ask()
        gone = self._roll_call.gone()
        if gone:
            hint = _HINT if self._member == "rank" else ""
            raise CollectiveError(
                f"{self.called} waits in {what}, but {self._member}(s) {gone} have left{hint}"
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
            self.check_same(what)

    def broadcast(self, array: np.ndarray, what: str) -> None:
        """Copy the contiguous `array` of rank 0 into that of every rank, in place."""
        self.enter(what)
        if self.size > 1:
            flat = movable(array).reshape(-1)
            step = max(1, _PIECE_BYTES // flat.itemsize)
            for start in range(0, max(1, flat.size), step):
                self.wait([self.mpi.Ibcast(flat[start : start + step], 0)], what)
                self.check_same(what)

    def allgather(self, value: Any, what: str = "an exchange of plans") -> List[Any]:
        """Return every rank's `value` in rank order; values are what JSON can say."""
        self.enter(what)
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.wait([self.mpi.Iallgather(np.array([mine.size], np.int64), lengths)], what)
        self.check_same(what)
        everything = np.empty(int(lengths.sum()), np.uint8)
        ends = np.cumsum(lengths)
        spans = (lengths.tolist(), (ends - lengths).tolist())
        self.wait([self.mpi.Iallgatherv(mine, [everything, spans, _byte()])], what)
        return [json.loads(everything[end - n : end].tobytes()) for n, end in zip(lengths, ends)]


def movable(array: np.ndarray) -> np.ndarray:
    """Half floats are unknown to MPI; for moving them their bytes will do."""
    return array.view(np.uint16) if array.dtype == np.float16 else array


def _byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE
