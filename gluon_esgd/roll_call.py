"""Which ranks of a node have come to which collective, told without a message."""

from __future__ import annotations

import functools
import os
import zlib
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from .errors import TopologyError
from .node_memory import Mapping, create_anywhere

__all__ = ["RollCall"]

# Names of collectives that a rank's row keeps: the last so many, cut to so many bytes.
_KEPT, _NAME_BYTES = 8, 120

# What is written at different moments lies in cache lines of its own.
_ROW = np.dtype(
    [
        ("entered", np.int64),
        ("left", np.int64),
        ("idle", np.int64),
        ("unused", np.int64, (5,)),
        ("marks", np.int64, (_KEPT,)),
        ("progress", np.int64),
        ("unused2", np.int64, (7,)),
        ("names", f"S{_NAME_BYTES}", (_KEPT,)),
    ]
)
_CELLS = _ROW.itemsize // 8
_ENTERED, _LEFT, _IDLE, _MARKS, _PROGRESS = (
    _ROW.fields[name][1] // 8  # type: ignore[index]
    for name in ("entered", "left", "idle", "marks", "progress")
)
_NAMES = _ROW.fields["names"][1]  # type: ignore[index]


@functools.lru_cache(maxsize=256)
def _label(what: str) -> Tuple[bytes, int]:
    name = what.encode()[:_NAME_BYTES]
    return name.ljust(_NAME_BYTES, b"\0"), zlib.crc32(name)


class RollCall:
    """Which ranks of this node have come to which collective, in memory they share.

    Parameters
    ----------
    rows : ndarray, shape (local_size,)
        Of each rank: collectives entered, whether it has come to its end, whether its engine
        was idle when it entered, the names of the last (and short marks of them, to compare
        at once), and how often it has met the others inside collectives; see `table`.
    ranks : sequence of int
        The rank in the communicator of each row.
    row : int
        This rank's row.
    """

    def __init__(self, rows: np.ndarray, ranks: Sequence[int], row: int) -> None:
        self._rows, self._ranks, self._row = rows, list(ranks), row
        # numpy takes a microsecond for what a memoryview does in thirty nanoseconds.
        self._cells = rows.view(np.int64).data
        self._names = rows.view(np.uint8).data[row * _ROW.itemsize + _NAMES :]
        self._base = row * _CELLS
        self._others = [k * _CELLS for k in range(len(self._ranks)) if k != row]

    @staticmethod
    def table(size: int, memory: Optional[Mapping] = None) -> np.ndarray:
        """Return empty rows for `size` ranks, in `memory` where it is given."""
        return np.zeros(size, _ROW) if memory is None else np.frombuffer(memory, _ROW, size)

    @classmethod
    def over(cls, node: Any, rank: int) -> RollCall:
        """Make one for the mpi4py communicator of a node's ranks; collective over them.

        The file behind the memory is unlinked before anyone uses it, so that
        nothing is left behind, however the processes end.

        Raises
        ------
        TopologyError
            On all ranks of the node: they cannot map a file together.
        """
        nbytes = node.size * _ROW.itemsize
        file, path, fault = -1, None, None
        try:
            if node.rank == 0:
                file, path = create_anywhere(nbytes)
        except OSError as error:
            fault = str(error)
        here, memory = node.bcast(path), None
        try:
            if here is not None:
                file = file if node.rank == 0 else os.open(here, os.O_RDWR)
                memory = Mapping.over(file, _ROW.itemsize, node.size, node.rank)
        except OSError as error:
            fault = str(error)
        faults = {r: said for r, said in node.allgather((rank, fault)) if said is not None}
        if file >= 0:
            os.close(file)
        if path is not None:
            os.unlink(path)
        if faults:
            raise TopologyError(
                f"ranks of one machine cannot share memory (fault by rank: {faults}): let them see "
                "the same /dev/shm or temporary folder (containers: --ipc=host or one container), "
                "with some kilobytes free"
            )
        return cls(cls.table(node.size, memory), node.allgather(rank), node.rank)

    def enter(self, what: str, idle: bool = False) -> None:
        """Say that this rank has come to its next collective, and which it is."""
        cells, base = self._cells, self._base
        name, mark = _label(what)
        entered = cells[base + _ENTERED] + 1
        slot = entered % _KEPT
        cells[base + _IDLE] = idle
        if cells[base + _MARKS + slot] != mark:
            self._names[slot * _NAME_BYTES : (slot + 1) * _NAME_BYTES] = name
            cells[base + _MARKS + slot] = mark
        cells[base + _ENTERED] = entered

    def leave(self) -> None:
        """Say that this rank has come to its end: it joins no collective but those of the end."""
        self._rows[self._row]["left"] = 1

    def advance(self) -> None:
        """Say that this rank has come to the next meeting point inside its collective."""
        self._cells[self._base + _PROGRESS] += 1

    def together(self) -> bool:
        """Whether every rank of the node has come to this rank's meeting point."""
        cells = self._cells
        here = cells[self._base + _PROGRESS]
        for other in self._others:  # noqa: SIM110 (a generator would take twice as long)
            if cells[other + _PROGRESS] < here:
                return False
        return True

    def alike(self) -> bool:
        """Whether the last name is that of every rank that has just met this one here.

        True says so; False may be the doing of a rank that is far ahead: see `others`.
        """
        cells, base = self._cells, self._base
        at = _MARKS + cells[base + _ENTERED] % _KEPT
        mark = cells[base + at]
        for other in self._others:  # noqa: SIM110
            if cells[other + at] != mark:
                return False
        return True

    def missing(self) -> List[int]:
        """Return the ranks of this node that have not yet come to where this one is."""
        here = self._rows[self._row]
        behind = (self._rows["entered"] < here["entered"]) | (
            self._rows["progress"] < here["progress"]
        )
        return [self._ranks[i] for i in np.flatnonzero(behind)]

    def counts(self) -> List[int]:
        """Return how many collectives each rank of this node has entered, by row."""
        return [int(count) for count in self._rows["entered"]]

    @property
    def entered(self) -> int:
        """How many collectives this rank has entered."""
        return int(self._cells[self._base + _ENTERED])

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
