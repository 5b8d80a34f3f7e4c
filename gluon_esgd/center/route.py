"""One set of keys of a vector, and the arrays from which they are pushed and into which pulled.

A chunk travels as it lies in the mailbox's memory, or in half floats through an array of its own.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from .memory import Memory

__all__ = ["Route", "X", "acknowledged"]

X = -1  # the number of x among the buffers, for `Memory.view`


def acknowledged(array: Any) -> None:
    """Wait until the servers have answered the push of `array`."""
    mx.base.check_call(mx.base._LIB.MXNDArrayWaitToWrite(array.handle))


class Route:
    """The chunks of a vector on their way to and from the servers.

    Parameters
    ----------
    kv : KVStore
    memory : Memory
    keys : sequence of int
        One for each chunk.
    half : sequence of bool
        Which chunks travel in half floats.

    Attributes
    ----------
    buffer : int or None
        The buffer pushed last, which the store has as its own now: a pull lands there.
    """

    def __init__(self, kv: Any, memory: Memory, keys: Sequence[int], half: Sequence[bool]) -> None:
        self.keys, self.buffer = list(keys), None  # type: List[int], Optional[int]
        self._kv, self._memory = kv, memory
        self._arrays = {number: self._cut(number) for number in (X, 0, 1)}
        self._halves = [
            mx.nd.zeros(stop - start, dtype="float16") if is_half else None
            for (start, stop), is_half in zip(memory.chunks, half)
        ]

    def _cut(self, number: int) -> List[Any]:
        view = self._memory.view(number)
        return [
            mx.nd.from_numpy(view[start:stop], zero_copy=True)
            for start, stop in self._memory.chunks
        ]

    def zeros(self) -> List[Any]:
        """Return arrays of zeros to initialize the keys with."""
        types = ["float32" if half is None else "float16" for half in self._halves]
        return [mx.nd.zeros(a.shape, dtype=t) for a, t in zip(self._arrays[X], types)]

    def round(self, number: int) -> None:
        """Make buffer `number` what the servers will get of it; waits."""
        for array, half in self._pairs(number, 0, None):
            if half is not None:
                mx.nd.cast(array, dtype="float16", out=half)
                mx.nd.cast(half, dtype="float32", out=array)
                array.wait_to_read()

    def push(self, number: int, first: int = 0, last: Optional[int] = None) -> List[Any]:
        """Push buffer `number`, or its chunks ``[first, last)``; return what `settle` takes."""
        sent = []
        for array, half in self._pairs(number, first, last):
            if half is not None:
                mx.nd.cast(array, dtype="float16", out=half)
            sent.append(array if half is None else half)
        self._kv.push(self.keys[first:last], sent)
        if number != X:
            self.buffer = number
        return sent

    def settle(self, sent: Sequence[Any]) -> None:
        """Wait until the servers have answered the pushes of `sent`."""
        for array in sent:
            acknowledged(array)
            self._count(array)

    def pull(self, number: int, first: int = 0, last: Optional[int] = None) -> None:
        """Pull into buffer `number`, or its chunks ``[first, last)``; waits."""
        self.ask(number, first, last)
        self.arrived(number, first, last)

    def ask(self, number: int, first: int = 0, last: Optional[int] = None) -> None:
        """Begin to pull, as `pull` does, when the servers have answered what was pushed before."""
        pairs = self._pairs(number, first, last)
        got = [array if half is None else half for array, half in pairs]
        self._kv.pull(self.keys[first:last], out=got)
        for array, half in pairs:
            if half is not None:
                mx.nd.cast(half, dtype="float32", out=array)

    def arrived(self, number: int, first: int = 0, last: Optional[int] = None) -> None:
        """Wait for what was asked for."""
        for array, half in self._pairs(number, first, last):
            array.wait_to_read()
            self._count(array if half is None else half)

    def size(self, chunk: int) -> int:
        """Return the floats of a chunk."""
        return int(self._arrays[X][chunk].size)

    def _pairs(self, number: int, first: int, last: Optional[int]) -> List[Tuple[Any, Any]]:
        return list(zip(self._arrays[number][first:last], self._halves[first:last]))

    def _count(self, array: Any) -> None:
        """Count what has moved as it arrives: the leader sees by it that servers still answer."""
        self._memory.count_moved(array.size * np.dtype(array.dtype).itemsize)
