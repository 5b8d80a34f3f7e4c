"""``ring``: reduce-scatter and allgather around a ring, as often as there are ranks.

Each rank sends ``2 (n - 1) / n`` of the vector, the least possible (Patarasuk
and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of
workstations*, 2009). Part ``p`` is summed in the order of ranks ``p + 1``,
``p + 2``, ..., ``p``: fixed, and made on one rank, so every rank has the same bits.
"""

from __future__ import annotations

from typing import Any, List

import numpy as np

from ..communicator import Communicator, movable
from .operations import Operation
from .parts import part
from .registry import Run, Task, register

__all__ = ["Ring", "allgather", "allreduce", "reduce_scatter"]

_TAG = 7
# Pieces in which a part travels, so that adding one overlaps receiving the next.
_PIECE_BYTES = 1 << 21
# So many are sent and received at a time; MPICH takes ten times as long with hundreds.
_UNDER_WAY = 2


class Ring:
    """The ranks of a communicator as a ring around which one vector goes.

    Parameters
    ----------
    array : ndarray, shape (n,)
    comm : Communicator
    op : Operation
        Its division is not made here.
    """

    def __init__(self, array: np.ndarray, comm: Communicator, op: Operation) -> None:
        self._comm, self._op = comm, op
        self._parts = [array[part(array.size, rank, comm.size)] for rank in range(comm.size)]
        longest = min(max(p.size for p in self._parts), _PIECE_BYTES // array.itemsize)
        self._spare = np.empty((_UNDER_WAY, longest), array.dtype)

    def reduce_scatter(self, what: str) -> None:
        """Reduce each rank's own part on it; the others are left with what passed through."""
        rank, n = self._comm.rank, self._comm.size
        for step in range(n - 1):
            sent, received = self._parts[(rank - step - 1) % n], self._parts[(rank - step - 2) % n]
            self._pass_on(what, sent, received, adds=True)

    def allgather(self, what: str) -> None:
        """Give every rank the parts that the others own."""
        rank, n = self._comm.rank, self._comm.size
        for step in range(n - 1):
            sent, received = self._parts[(rank - step) % n], self._parts[(rank - step - 1) % n]
            self._pass_on(what, sent, received, adds=False)

    def _pass_on(self, what: str, sent: np.ndarray, target: np.ndarray, adds: bool) -> None:
        """Send to the next rank, receive from the one before, and add piece by piece."""
        comm, spare = self._comm, self._spare
        following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        out, targets = _pieces(sent), _pieces(target)
        places = targets
        if adds:
            places = [spare[i % _UNDER_WAY][: t.size] for i, t in enumerate(targets)]
        sends: List[Any] = []
        receives: List[Any] = []
        for turn in range(max(len(out), len(targets)) + _UNDER_WAY):
            # A place is received into again only when what it held has been added.
            if turn >= _UNDER_WAY:
                done = turn - _UNDER_WAY
                if done < len(targets):
                    comm.wait([receives[done]], what, under_way=[*receives, *sends])
                    if adds:
                        self._op.combine(places[done], targets[done], out=targets[done])
                if done < len(out):
                    comm.wait([sends[done]], what, under_way=[*receives, *sends])
            if turn < len(targets):
                receives.append(comm.mpi.Irecv(places[turn], before, _TAG))
            if turn < len(out):
                sends.append(comm.mpi.Isend(out[turn], following, _TAG))
        comm.sent_bytes += sent.nbytes


def _pieces(part: np.ndarray) -> List[np.ndarray]:
    length = _PIECE_BYTES // part.itemsize
    return [part[i : i + length] for i in range(0, part.size, length)]


@register("allreduce", "ring")
def allreduce(task: Task) -> Run:
    """Reduce around the ring, then gather around it; parts are cut in pieces that overlap."""
    ring = Ring(task.array, task.comm, task.op)

    def run(what: str) -> None:
        ring.reduce_scatter(what)
        ring.allgather(what)
        task.op.finish(task.array, task.count)

    return run


@register("reduce_scatter", "ring")
def reduce_scatter(task: Task) -> Run:
    """The first half of the ring."""
    ring = Ring(task.array, task.comm, task.op)
    own = task.array[part(task.array.size, task.comm.rank, task.comm.size)]

    def run(what: str) -> None:
        ring.reduce_scatter(what)
        task.op.divide(own, task.op.divisor(task.count))

    return run


@register("allgather", "ring")
def allgather(task: Task) -> Run:
    """The second half of the ring."""
    return Ring(movable(task.array), task.comm, task.op).allgather
