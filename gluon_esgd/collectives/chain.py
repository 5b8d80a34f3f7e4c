"""``chain``: a broadcast from rank to rank, piece by piece.

Each rank passes on what it receives, so nobody sends more than one vector, and with many pieces
all links work at once: ``P + n - 2`` turns for ``P`` pieces and ``n`` ranks.
"""

from __future__ import annotations

from typing import Any, Callable, List

import numpy as np

from ..communicator import Communicator, movable
from .flow import UNDER_WAY
from .registry import Run, Task, register

__all__ = ["broadcast", "pass_along"]

_TAG = 8
_PIECE_BYTES = 1 << 19


@register("broadcast", "chain")
def broadcast(task: Task) -> Run:
    """Pass the root's vector along the ranks that follow it."""
    comm, wire, root = task.comm, movable(task.array), task.root
    return lambda what: pass_along(wire, comm, root, what, lambda piece: None)


def pass_along(
    array: np.ndarray, comm: Communicator, root: int, what: str, take: Callable[[slice], None]
) -> None:
    """Give every rank of `comm` the `array` of `root`, in place; ``take(piece)`` when it is there.

    Parameters
    ----------
    array : ndarray, shape (n,)
        Of a type that MPI knows, see `communicator.movable`.
    comm : Communicator
    root : int
    what : str
        The collective, for messages.
    take : callable
        Called with each piece of `array`, in order, once it may be read.
    """
    place = (comm.rank - root) % comm.size
    before, following = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    length = _PIECE_BYTES // array.itemsize
    pieces = [slice(i, min(i + length, array.size)) for i in range(0, array.size, length)]
    receives: List[Any] = []
    sends: List[Any] = []
    for i, piece in enumerate(pieces):
        if place > 0:
            for ahead in pieces[len(receives) : i + UNDER_WAY]:
                receives.append(comm.mpi.Irecv(array[ahead], before, _TAG))
            comm.wait([receives[i]], what, under_way=[*receives, *sends])
        if place < comm.size - 1:
            if i >= UNDER_WAY:
                comm.wait([sends[i - UNDER_WAY]], what, under_way=[*receives, *sends])
            sends.append(comm.mpi.Isend(array[piece], following, _TAG))
            comm.sent_bytes += array[piece].nbytes
        take(piece)
    comm.wait(sends[-UNDER_WAY:], what, under_way=sends)
