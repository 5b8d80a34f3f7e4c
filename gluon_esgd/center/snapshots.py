"""The center on disk, for a job that has lost every process that held it in memory.

One file for each vector, ``{name}-{checksum of its sizes}.npy``: float32, as numpy writes it. It is
written beside its place and then moved there, so it is whole or not there. Its time is when the
center came from the servers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Mapping, Optional, Tuple
from urllib.parse import quote

import numpy as np

from .contract import own_contract
from .memory import Memory

__all__ = ["Snapshots"]

Centers = Mapping[str, Tuple[Memory, float]]  # by name: memory, and when its center came

_log = logging.getLogger(__name__)


class Snapshots:
    """Writes the last whole centers of a leader, and reads them.

    Parameters
    ----------
    folder : Path
        Made, private, at the first write.
    every_s : float
        Seconds from one write to the next.
    """

    def __init__(self, folder: Path, every_s: float) -> None:
        self._folder, self._every_s = folder, every_s
        self._looked_at = time.monotonic()
        self._thread: Optional[threading.Thread] = None
        self._lock = threading.Lock()  # who leaves writes while the thread may still be at it

    def look(self, centers: Centers, place: int) -> None:
        """Begin to write what is new, on a thread, when it is time; does not wait.

        All leaders do. The first of a generation writes; one of a later `place` finds that it did,
        and takes over when it has left.
        """
        busy = self._thread is not None and self._thread.is_alive()
        if busy or time.monotonic() - self._looked_at < self._every_s / 10:
            return
        self._looked_at = time.monotonic()
        age_s = self._every_s * (1 + min(place, 10) / 10)
        self._thread = threading.Thread(
            target=self.write, args=(centers, age_s), name="center snapshot", daemon=True
        )
        self._thread.start()

    def write(self, centers: Centers, age_s: float = 0.0) -> None:
        """Write the centers that are newer than those on disk, if these have this age.

        A failure is logged.
        """
        with self._lock:
            for name, (memory, came_at) in centers.items():
                path = self._path(name, memory)
                try:
                    if _is_older(path, min(came_at, time.time() - age_s)):
                        self._write(path, memory, came_at)
                except OSError as error:
                    _log.warning("the center of %r was not written to disk: %s", name, error)

    def _write(self, path: Path, memory: Memory, came_at: float) -> None:
        center = np.empty(memory.size, np.float32)
        memory.copy_center(center)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Two leaders may write at the same time, one that leaves and the one that writes else.
        beside = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(fd, "wb") as file:
                np.save(file, center, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            os.utime(beside, (came_at, came_at))
            if _is_older(path, came_at):  # another leader's may have come meanwhile
                os.replace(beside, path)
            else:
                beside.unlink()
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise

    def read(self, name: str, memory: Memory) -> bool:
        """Put the center that was written of a vector into its x, if there is one of its layout."""
        path = self._path(name, memory)
        if not path.exists():
            for other in self._folder.glob(f"{quote(name, safe='')}-{'[0-9a-f]' * 8}.npy"):
                _log.warning("%s is of a network of other sizes, and is not used", other)
            return False
        fault = _fault(path, memory.size)
        if fault is not None:
            _log.warning("%s %s, and is not used", path, fault)
            return False
        center = np.load(path, allow_pickle=False)
        np.copyto(memory.x, center)
        return True

    def _path(self, name: str, memory: Memory) -> Path:
        checksum = own_contract(memory.sizes.tolist(), memory.chunks)["sizes (checksum)"]
        return self._folder / f"{quote(name, safe='')}-{checksum:08x}.npy"


def _fault(path: Path, size: int) -> Optional[str]:
    """What is wrong with a file that is to hold `size` floats; None if it does.

    Its head is read by itself: `np.load` would take what it says for how much memory to get.
    """
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                return f"is of version {version} of numpy's format, not (1, 0)"
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            left = os.fstat(file.fileno()).st_size - file.tell()
    except Exception as error:  # the parser of the head raises what it likes
        return f"is damaged ({error})"
    if (shape, dtype) != ((size,), np.dtype(np.float32)):
        return f"holds {dtype} of shape {shape}, not float32 of shape ({size},)"
    return None if left == 4 * size else f"is damaged: {left} bytes of {4 * size} are there"


def _is_older(path: Path, came_at: float) -> bool:
    """Whether what is on disk, if anything, came before this time."""
    try:
        return path.stat().st_mtime < came_at
    except FileNotFoundError:
        return True
