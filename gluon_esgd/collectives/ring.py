"""``ring``: reduce-scatter and allgather around a ring, as often as there are ranks.

Each rank sends ``2 (n - 1) / n`` of the vector, the least possible (Patarasuk
and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of
workstations*, 2009). Part ``p`` is summed in the order of ranks ``p + 1``,
``p + 2``, ..., ``p``: fixed, and made on one rank, so every rank has the same bits.
"""

from __future__ import annotations

from typing import List, Union

import numpy as np

from ..communicator import Communicator, movable
from .flow import UNDER_WAY, Flow
from .half_ring import HalfRing
from .operations import Operation
from .parts import part
from .registry import Run, Task, register

__all__ = ["Ring", "allgather", "allreduce", "around", "reduce_scatter"]

# Pieces in which a part travels, so that adding one overlaps receiving the next.
_PIECE_BYTES = 1 << 21


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
        self._spare = np.empty((UNDER_WAY, longest), array.dtype)

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
        out, targets, places = _pieces(sent), _pieces(target), _pieces(target)
        if adds:
            places = [self._spare[i % UNDER_WAY][: t.size] for i, t in enumerate(targets)]

        def take(i: int) -> None:
            if adds:
                self._op.combine(places[i], targets[i], out=targets[i])

        flow = Flow(len(out), out.__getitem__, len(targets), places.__getitem__, take)
        flow.run(self._comm, what)


def _pieces(part: np.ndarray) -> List[np.ndarray]:
    length = _PIECE_BYTES // part.itemsize
    return [part[i : i + length] for i in range(0, part.size, length)]


def around(
    array: np.ndarray, comm: Communicator, op: Operation, compresses: bool
) -> Union[Ring, HalfRing]:
    """Return the ring on which `array` goes; with `compresses` as half floats between machines."""
    return HalfRing(array, comm, op) if compresses else Ring(array, comm, op)


@register("allreduce", "ring", compresses=True)
def allreduce(task: Task) -> Run:
    """Reduce around the ring, then gather around it; parts are cut in pieces that overlap."""
    ring = around(task.array, task.comm, task.op, task.compresses)

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
