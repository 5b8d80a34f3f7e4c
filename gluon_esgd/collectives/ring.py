"""``ring``: reduce-scatter and allgather around a ring, as often as there are ranks.

Each rank sends ``2 (n - 1) / n`` of the vector, the least possible (Patarasuk
and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of
workstations*, 2009). Part ``p`` is summed in the order of ranks ``p``,
``p + 1``, ...: fixed, and made on one rank, so every rank has the same bits.
"""

from __future__ import annotations

from typing import List, Optional

import numpy as np

from ..communicator import Communicator
from .registry import register

__all__ = ["allreduce"]

_TAG = 7
# Pieces in which a part travels, so that adding one overlaps receiving the next.
_PIECE_BYTES = 1 << 18


@register("ring")
def allreduce(array: np.ndarray, comm: Communicator, what: str) -> None:
    """Sum around a ring of neighbours; parts are cut in pieces that overlap."""
    n, rank = comm.size, comm.rank
    parts = [array[array.size * i // n : array.size * (i + 1) // n] for i in range(n)]
    spare = np.empty(max(p.size for p in parts), array.dtype)
    for step in range(n - 1):
        sent, received = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        _pass_on(comm, what, sent, spare[: received.size], received)
    for step in range(n - 1):
        sent, received = parts[(rank + 1 - step) % n], parts[(rank - step) % n]
        _pass_on(comm, what, sent, received, None)


def _pass_on(
    comm: Communicator, what: str, sent: np.ndarray, into: np.ndarray, add_to: Optional[np.ndarray]
) -> None:
    """Send to the next rank, receive from the one before, and add piece by piece."""
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    receives = [comm.mpi.Irecv(piece, before, _TAG) for piece in _pieces(into)]
    sends = [comm.mpi.Isend(piece, following, _TAG) for piece in _pieces(sent)]
    for request, piece, target in zip(
        receives, _pieces(into), _pieces(into if add_to is None else add_to)
    ):
        comm.wait([request], what)
        if add_to is not None:
            np.add(piece, target, out=target)
    comm.wait(sends, what)


def _pieces(part: np.ndarray) -> List[np.ndarray]:
    length = _PIECE_BYTES // part.itemsize
    return [part[i : i + length] for i in range(0, part.size, length)]
