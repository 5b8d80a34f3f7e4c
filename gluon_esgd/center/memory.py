"""The shared memory behind a mailbox: made by the leader, mapped by its agent.

One anonymous file (``memfd``), handed over as a descriptor, so that it has no
name to clean up and outlives any agent; a new agent maps the same one. It
describes itself: header words, tables, then flat float32 vectors

``x``     the leader's; only it writes there, except that `start_reduce` sums in place
``b0 b1`` the agent's; one holds the last *whole* center, the other may be in work
``base``  the center from which an ``asgd`` client counts its changes; the agent's, but that the
          leader may set it while nothing is in flight

The header word `CENTER` is ``2 * version + i``, where ``b[i]`` holds the whole
center number `version`; 0 before the first. An agent changes this word before
it writes into the buffer that the word named, so an agent that is killed at
any instant leaves a whole center, and a reader that finds the word unchanged
after its copy has a whole one. Untouched pages take no memory.

The header word `STAGE` is ``4 * serial + stage``: how far the agent is with exchange
number `serial`. While it is `ACKNOWLEDGED` the difference of that exchange lies in the buffer
that is not whole, and the servers have it. The agent sets the word to 0 before it overwrites that
difference with something else than the next exchange.
"""

from __future__ import annotations

import mmap
import os
from typing import List, Sequence, Tuple

import numpy as np

__all__ = ["ACKNOWLEDGED", "IDLE", "PULLING", "PUSHING", "Memory"]

IDLE, PULLING, PUSHING, ACKNOWLEDGED = range(4)

_PAGE = 4096
_FLOATS, _PARAMETERS, _CHUNKS, _CENTER, _MOVED_BYTES, _DISTANCE, _STAGE = range(7)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class Memory:
    """The vectors and header words of one trainer's mailbox, as numpy views.

    Parameters
    ----------
    fd : int
        Descriptor of the file; the object owns it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._words = np.frombuffer(self._map, np.int64, _PAGE // 8)
        self._reals = np.frombuffer(self._map, np.float64, _PAGE // 8)
        size, parameters, count = (int(v) for v in self._words[: _CHUNKS + 1])
        tables = np.frombuffer(self._map, np.int64, 2 * parameters + 3 * count, _PAGE)
        self.size = size
        ends = [parameters, 2 * parameters, 2 * parameters + count]
        self.sizes, self.kinds, exact, flat = np.split(tables, ends)
        self.exact: List[bool] = [bool(e) for e in exact]
        self.chunks: List[Tuple[int, int]] = [(int(a), int(b)) for a, b in flat.reshape(-1, 2)]
        self._first = _PAGE + _pages(tables.nbytes)
        self.x, b0, b1, self.base = (self._vector(i) for i in range(4))
        self.buffers = (b0, b1)

    @classmethod
    def create(
        cls, sizes: Sequence[int], chunks: Sequence[Tuple[int, int]], exact: Sequence[bool] = ()
    ) -> Memory:
        """Make the file for parameters of `sizes` floats, cut into `chunks`; which are `exact`."""
        flags = list(exact) or [False] * len(chunks)
        fd = os.memfd_create("gluon-esgd-mailbox")
        tables = np.array([*sizes, *([0] * len(sizes)), *flags, *np.ravel(chunks)], np.int64)
        vector = _pages(4 * sum(sizes))
        os.ftruncate(fd, _PAGE + _pages(tables.nbytes) + 4 * vector)
        head = np.array([sum(sizes), len(sizes), len(chunks)], np.int64)
        os.pwrite(fd, head.tobytes(), 0)
        os.pwrite(fd, tables.tobytes(), _PAGE)
        return cls(fd)

    def _vector(self, number: int) -> np.ndarray:
        start = self._first + number * _pages(4 * self.size)
        return np.frombuffer(self._map, np.float32, self.size, start)

    def view(self, number: int) -> np.ndarray:
        """Return a new view of buffer `number`, or of x for -1; MXNet makes its own read-only."""
        return self._vector(number + 1)

    @property
    def center_word(self) -> int:
        """``2 * version + buffer``, or 0."""
        return int(self._words[_CENTER])

    @property
    def version(self) -> int:
        """How many whole centers have arrived."""
        return self.center_word // 2

    @property
    def whole(self) -> int:
        """Which buffer holds the last whole center, or -1."""
        return self.center_word % 2 if self.center_word else -1

    def set_center(self, version: int, buffer: int) -> None:
        """State that ``buffers[buffer]`` holds the whole center number `version`."""
        self._words[_CENTER] = 2 * version + buffer

    @property
    def stage(self) -> Tuple[int, int]:
        """Number of the exchange that an agent was at last, and how far it has come with it."""
        serial, stage = divmod(int(self._words[_STAGE]), 4)
        return serial, stage

    def set_stage(self, serial: int, stage: int) -> None:
        """State how far exchange number `serial` has come."""
        self._words[_STAGE] = 4 * serial + stage

    @property
    def layout(self) -> Tuple[List[int], List[Tuple[int, int]], List[bool]]:
        """Sizes, chunks, and which chunks are exact: what other memory must have alike."""
        return self.sizes.tolist(), self.chunks, self.exact

    @property
    def moved_bytes(self) -> int:
        """Bytes pushed to and pulled from the servers so far."""
        return int(self._words[_MOVED_BYTES])

    def count_moved(self, num_bytes: int) -> None:
        """Add `num_bytes` that were pushed or pulled."""
        self._words[_MOVED_BYTES] += num_bytes

    @property
    def distance(self) -> float:
        """L2 norm of x minus center over the moved parameters at the last exchange.

        Not finite where nothing was pushed.
        """
        return float(self._reals[_DISTANCE])

    @distance.setter
    def distance(self, value: float) -> None:
        self._reals[_DISTANCE] = value

    def copy_center(self, out: np.ndarray) -> bool:
        """Copy the last whole center into `out`; False where there is none."""
        while True:
            word = self.center_word
            if not word:
                return False
            np.copyto(out, self.buffers[word % 2])
            if self.center_word == word:
                return True

    def copy_shift(self, rule: str, out: np.ndarray) -> np.ndarray:
        """Copy into `out`, and return, the shift of an exchange that the agent has completed."""
        if rule == "esgd":
            return np.negative(self.buffers[1 - self.whole], out=out)
        return np.subtract(self.buffers[self.whole], self.x, out=out)

    def close(self) -> None:
        """Give up the descriptor; the mapping goes with the last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
