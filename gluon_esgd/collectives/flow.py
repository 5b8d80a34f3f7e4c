"""A step around a ring of ranks, piece by piece."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple

import numpy as np

from ..communicator import Communicator

__all__ = ["UNDER_WAY", "Flow"]

_TAG = 7
# So many are sent and received at a time; MPICH takes ten times as long with hundreds.
UNDER_WAY = 2


class Flow(NamedTuple):
    """Pieces to the next rank, and pieces from the one before.

    Attributes
    ----------
    sends : int
    give : callable
        ``give(i)`` returns what is sent as piece `i`, in memory that lay in piece ``i - UNDER_WAY``
        at the latest.
    receives : int
    place : callable
        ``place(i)`` returns where piece `i` is received.
    take : callable
        ``take(i)`` is called when it is there; only then is a piece received in place of it.
    """

    sends: int
    give: Callable[[int], np.ndarray]
    receives: int
    place: Callable[[int], np.ndarray]
    take: Callable[[int], None]

    def run(self, comm: Communicator, what: str) -> None:
        """Send and receive all of them."""
        following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sends: List[Any] = []
        receives: List[Any] = []
        for turn in range(max(self.sends, self.receives) + UNDER_WAY):
            # A place is received into again only when what it held has been taken.
            if turn >= UNDER_WAY:
                done = turn - UNDER_WAY
                if done < self.receives:
                    comm.wait([receives[done]], what, under_way=[*receives, *sends])
                    self.take(done)
                if done < self.sends:
                    comm.wait([sends[done]], what, under_way=[*receives, *sends])
            if turn < self.receives:
                receives.append(comm.mpi.Irecv(self.place(turn), before, _TAG))
            if turn < self.sends:
                piece = self.give(turn)
                sends.append(comm.mpi.Isend(piece, following, _TAG))
                comm.sent_bytes += piece.nbytes
