"""Which ranks of a node have come to which collective, told without a message."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

__all__ = ["RollCall"]

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
        """Return the ranks that have come to another collective here, and to which.

        They write while this one reads: a name counts only where its rank had come here
        before it was read, and had not gone so far since that it was overwritten.
        """
        here = int(self._rows[self._row]["entered"])
        slot = here % _KEPT
        before = self._rows["entered"].copy()
        names = self._rows["names"][:, slot].copy()
        after = self._rows["entered"].copy()
        apart = (names != names[self._row]) & (before >= here) & (after < here + _KEPT - 1)
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
