"""SIGTERM: noticed on any rank, acted on by all ranks at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Iterator, List, Optional

import mxnet as mx
import numpy as np

from ..communicator import Communicator
from ..topology import World

__all__ = ["SAVE", "STOP", "Signal", "Votes"]

SAVE, STOP = 1, 2  # what ranks can vote for, as bits
_DECIDED = 4  # by all clients of a split world: stop
# Clients of a split world meet for this so seldom, in steps: they need not keep pace otherwise.
_CLIENTS_EVERY = 4
# Batch systems signal a whole group: a rank gets it from them, its wrapper and the launcher.
_SAME_S = 2.0


class Signal:
    """Whether SIGTERM has come while `watched`.

    Attributes
    ----------
    came : bool
    """

    def __init__(self) -> None:
        self.came = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take the first SIGTERM, and what comes within two seconds of it.

        A later one does what it did before, as a rule end the process.

        Only the main thread can; in another nothing is watched.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

        first_at = 0.0

        def note(number: int, frame: Any) -> None:
            nonlocal first_at
            if not self.came:
                self.came, first_at = True, time.monotonic()
            elif time.monotonic() - first_at > _SAME_S:
                signal.signal(signal.SIGTERM, before)
                os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGTERM, note)
        try:
            with _not_in_children(before):
                yield
        finally:
            if signal.getsignal(signal.SIGTERM) is note:
                signal.signal(signal.SIGTERM, before)


# While watched: what SIGTERM does to forked children, a DataLoader's workers. Pools end them by it.
_in_children: List[Any] = []
_mask: List[Any] = []


@contextmanager
def _not_in_children(before: Any) -> Iterator[None]:
    _hook_forks()
    _in_children.append(before)
    try:
        yield
    finally:
        _in_children.remove(before)


@lru_cache(maxsize=None)
def _hook_forks() -> None:
    """See that a signal to a new child is neither lost nor noted: Python drops what came before
    its own after-fork work is done, so the signal has to wait for that."""

    def block() -> None:
        _mask.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask.pop())

    def put_back() -> None:
        if _in_children:
            signal.signal(signal.SIGTERM, _in_children[-1])
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=put_back)


class Votes:
    """What any rank voted for at the last step, known to all ranks at this one.

    An exchange of one number is started at each step and completed at the next, when it is there
    as a rule: nobody waits for ranks that are not a whole step behind, and all ranks learn the same
    at the same step. In a split world the leaders exchange the same way, every few steps.

    Parameters
    ----------
    world : World
        Making one is collective in the job where that is split, else in the client.
    """

    def __init__(self, world: World) -> None:
        self._world, self._is_split = world, world.settings.is_split
        self._ranks = _Exchange(world.control, "the votes of ranks")
        self._clients: Optional[_Exchange] = None
        self._last = self._count = 0
        if world.leaders is not None:
            mx.nd.waitall()  # leaders have one communicator for engine and main thread
            self._clients = _Exchange(world.leaders, "the votes of clients")

    def cast(self, vote: int) -> int:
        """Vote, and return what ranks voted for at the last call; collective in the client.

        In a split world `STOP` is returned to all ranks of the job at the same call.

        Parameters
        ----------
        vote : int
            Bits `SAVE` and `STOP`.
        """
        if self._clients is not None and self._count % _CLIENTS_EVERY == 0:
            decided = self._clients.next(self._last & STOP)
            vote |= _DECIDED if decided & STOP else 0
        self._count += 1
        self._last |= self._ranks.next(vote)
        said = self._last
        self._last &= STOP  # until the clients have heard it
        if self._is_split:
            return said & SAVE | (STOP if said & _DECIDED else 0)
        return said

    def now(self, vote: int) -> int:
        """Return what anybody votes for now; collective in the job where that is split, else in
        the client, and waits for all."""
        self.close()
        for number in self._world.allgather(vote):
            vote |= number
        if self._is_split:
            if self._clients is not None:
                self._clients.next(vote)
                vote = self._clients.complete()
            vote = self._world.broadcast(vote)
        return vote

    def close(self) -> None:
        """Complete what is under way; collective as `cast`."""
        for exchange in (self._ranks, self._clients):
            if exchange is not None:
                exchange.complete()


class _Exchange:
    """The bitwise or of numbers of all members, one call later."""

    def __init__(self, comm: Communicator, what: str) -> None:
        self._comm, self._what = comm, what
        self._mpi = _duplicate(comm, what) if comm.size > 1 else None
        self._mine, self._all = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._requests: List[Any] = []

    def next(self, number: int) -> int:
        said = self.complete()
        self._mine[0] = number
        if self._mpi is None:
            return number
        from mpi4py import MPI

        self._requests = [self._mpi.Iallreduce(self._mine, self._all, op=MPI.BOR)]
        return said

    def complete(self) -> int:
        if self._requests:
            requests, self._requests = self._requests, []
            self._comm.wait(requests, self._what, under_way=[(self._mine, self._all)])
        return int(self._all[0])


def _duplicate(comm: Communicator, what: str) -> Any:
    """A communicator of its own: what is under way there meets no other collective."""
    made, request = comm.mpi.Idup()
    comm.wait([request], f"making room for {what}")
    return made
