"""As much of ``cupy.cuda.nccl`` as the collectives use: members meet in files of a folder."""

from __future__ import annotations

import ctypes
import os
import tempfile
from typing import Any, Callable, List, Optional

import numpy as np

from . import fake_cupy

available = True
NCCL_SUM, NCCL_MAX, NCCL_MIN = 0, 2, 3
NCCL_INT32, NCCL_INT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = 2, 4, 6, 7, 8
_TYPES = {2: "i4", 4: "i8", 6: "f2", 7: "f4", 8: "f8"}
_COMBINE = {0: np.add, 2: np.maximum, 3: np.minimum}

_depth = 0
aborted: List[int] = []
fails: Optional[str] = None  # what a communicator that is made says


def get_unique_id() -> Any:
    path = tempfile.mkdtemp(prefix="fake-nccl-", dir=fake_cupy.machine.folder).encode()
    number = path.ljust(128, b"\xff")
    return number if _speaks_bytes() else tuple(np.frombuffer(number, np.int8).tolist())


def _speaks_bytes() -> bool:
    return fake_cupy.machine.version.startswith("14")


def groupStart() -> None:
    global _depth
    _depth += 1


def groupEnd() -> None:
    global _depth
    _depth -= 1


class NcclCommunicator:
    def __init__(self, count: int, number: Any, rank: int) -> None:
        if fails:
            raise RuntimeError(fails)
        assert type(number) is (bytes if _speaks_bytes() else tuple) and len(number) == 128
        self.folder = bytes(b % 256 for b in number).rstrip(b"\xff").decode()
        self.count, self.rank, self.device = count, rank, fake_cupy.machine.device[-1]
        self.calls = 0

    def abort(self) -> None:
        aborted.append(self.rank)

    def _meet(
        self, stream: int, source: int, size: int, kind: int, finish: Callable[[List[Any]], None]
    ) -> None:
        """Show all members `size` elements at `source`; `finish` gets those of all."""
        assert _depth > 0, "several members of a process outside of a group wait for ever"
        assert fake_cupy.machine.device[-1] == self.device
        self.calls += 1
        call, shown = self.calls, []
        dtype = np.dtype(_TYPES[kind])

        def path(rank: int) -> str:
            return os.path.join(self.folder, f"{call}-{rank}")

        def work() -> bool:
            if not shown:
                with open(path(self.rank) + ".part", "wb") as file:
                    file.write(ctypes.string_at(source, size * dtype.itemsize))
                os.rename(path(self.rank) + ".part", path(self.rank))
                shown.append(True)
            if not all(os.path.exists(path(rank)) for rank in range(self.count)):
                return False
            finish([np.fromfile(path(rank), dtype) for rank in range(self.count)])
            return True

        fake_cupy.machine.streams[stream].start(work)

    def allReduce(
        self, source: int, target: int, size: int, kind: int, op: int, stream: int
    ) -> None:
        def finish(vectors: List[np.ndarray]) -> None:
            _write(target, _combined(vectors, op))

        self._meet(stream, source, size, kind, finish)

    def reduceScatter(
        self, source: int, target: int, size: int, kind: int, op: int, stream: int
    ) -> None:
        def finish(vectors: List[np.ndarray]) -> None:
            _write(target, _combined(vectors, op)[self.rank * size : (self.rank + 1) * size])

        self._meet(stream, source, size * self.count, kind, finish)

    def allGather(self, source: int, target: int, size: int, kind: int, stream: int) -> None:
        self._meet(stream, source, size, kind, lambda v: _write(target, np.concatenate(v)))

    def broadcast(
        self, source: int, target: int, size: int, kind: int, root: int, stream: int
    ) -> None:
        self._meet(stream, source, size, kind, lambda vectors: _write(target, vectors[root]))


def _combined(vectors: List[np.ndarray], op: int) -> np.ndarray:
    total = vectors[0].copy()
    for vector in vectors[1:]:
        _COMBINE[op](total, vector, out=total)
    return total


def _write(target: int, values: np.ndarray) -> None:
    values = np.ascontiguousarray(values)
    ctypes.memmove(target, values.ctypes.data, values.nbytes)
