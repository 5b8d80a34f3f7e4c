"""Memory that the ranks of a machine map together, and that leaves nothing behind."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import List, Optional, Tuple

import numpy as np

__all__ = ["Mapping", "create", "create_anywhere", "mapping_of", "reserve"]

_FOLDER = "/dev/shm"


class Mapping(mmap.mmap):
    """A file that several ranks have mapped; its kernel memory goes with the last of them.

    Attributes
    ----------
    name : str
        Of this memory alone, and the same on all ranks that have it.
    own : int
        Which part is this rank's.
    """

    name: str = ""
    own: int = 0

    @property
    def parts(self) -> List[np.ndarray]:
        """Each rank's part, by local rank."""
        length = len(self) // self._count
        return [np.frombuffer(self, np.uint8, length, k * length) for k in range(self._count)]

    _count: int = 1

    @classmethod
    def over(cls, file: int, nbytes: int, count: int, own: int, name: str = "") -> Mapping:
        """Map `count` parts of `nbytes` bytes each; this rank's is number `own`."""
        made = cls(file, nbytes * count) if file >= 0 else cls(-1, nbytes * count)
        made._count, made.own, made.name = count, own, name
        return made

    def locate(self, array: np.ndarray) -> Optional[int]:
        """Return how many bytes into the own part `array` begins; None: not in it."""
        mine = self.parts[self.own]
        offset = array.ctypes.data - mine.ctypes.data
        return offset if 0 <= offset <= mine.nbytes - array.nbytes else None


def create(nbytes: int) -> Tuple[int, str]:
    """Make a file in memory; return its descriptor and path. The maker unlinks it.

    Parameters
    ----------
    nbytes : int
        Its length; memory is taken by `reserve`.
    """
    file, path = tempfile.mkstemp(prefix="gluon_esgd_", dir=_FOLDER)
    os.ftruncate(file, nbytes)
    return file, path


def create_anywhere(nbytes: int) -> Tuple[int, str]:
    """Make a small file of `nbytes`, on a disk where there is no room in memory."""
    file = None
    try:
        file, path = create(nbytes)
        reserve(file, 0, nbytes)
    except OSError:
        if file is not None:
            os.close(file)
            os.unlink(path)
        file, path = tempfile.mkstemp(prefix="gluon_esgd_")
        reserve(file, 0, nbytes)
    return file, path


def reserve(file: int, start: int, nbytes: int) -> None:
    """Take memory for a part of `file`, near the core that calls.

    A file that is only made longer would end the process by SIGBUS where memory runs out.

    Raises
    ------
    OSError
        No room, in words.
    """
    try:
        os.posix_fallocate(file, start, nbytes)
    except OSError as error:
        raise OSError(error.errno, f"{nbytes} bytes of memory: {error.strerror}") from None


def mapping_of(array: np.ndarray) -> Optional[Mapping]:
    """Return the mapping in which `array` lies; None where it has memory of its own."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, Mapping) else None
