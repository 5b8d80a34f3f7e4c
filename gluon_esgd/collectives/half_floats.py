"""Floats as half floats in a message: a block is scaled by a power of two, then rounded.

A message holds, one behind the other, elements that stay as they are, the power of two of each
block, and the half floats (IEEE 754 binary16). The largest finite magnitude of a block comes to lie
in [2^14, 2^15): nothing overflows, what is larger than 2^-28 of it is rounded by a relative 2^-11
at most, the rest by 2^-39 of it. Inf and NaN arrive as such.

numpy converts one element at a time. Integer arithmetic over a block in cache takes half as long
for rounding and a quarter for the way back. It knows finite values only, so the power of two of a
block that holds others is negative, and numpy converts that block.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import numpy as np

from .parts import blocks

__all__ = ["HalfFloats", "Message", "largest_message"]

BLOCK = 1 << 15  # elements with one power of two; with what is computed they fit a core's cache

_TOP = 15  # bits above the point of the largest magnitude
# A float32 times 2^-112 has the bits of the half float, 13 places to the left of them.
_DOWN, _UP, _PLACES = np.float32(2.0**-112), np.float32(2.0**112), 13
_SIGN = np.int32(-(1 << 15))  # from the sign of a half float upwards
_NO_SIGNS = np.int32(-0x70000001)  # all bits but the copies of the sign that a shift leaves


class Message(NamedTuple):
    """A piece of a vector on its way: parts of one buffer.

    Attributes
    ----------
    buffer : ndarray of uint8
        All of it.
    exact : ndarray, shape (exact,)
        The last elements of the piece, as they are.
    scales : ndarray, shape (blocks,)
        By what each block was multiplied, in the type of the vector.
    halves : ndarray of int16
        The bits of the half floats.
    """

    buffer: np.ndarray
    exact: np.ndarray
    scales: np.ndarray
    halves: np.ndarray

    @classmethod
    def over(cls, memory: np.ndarray, size: int, exact: int, dtype: np.dtype) -> Message:
        """Lay a message of `size` elements into `memory`, the last `exact` as they are."""
        behind = exact * dtype.itemsize
        end = behind + _count(size - exact) * dtype.itemsize
        buffer = memory[: end + 2 * (size - exact)]
        head = buffer[:end].view(dtype)
        return cls(buffer, head[:exact], head[exact:], buffer[end:].view(np.int16))


def _count(size: int) -> int:
    return -(-size // BLOCK)


def largest_message(size: int, exact: int, dtype: np.dtype) -> int:
    """Return the bytes of the longest message of up to `size` elements, up to `exact` as are."""
    return 2 * size + (exact + _count(size)) * dtype.itemsize


class HalfFloats:
    """Makes messages of vectors and vectors of messages.

    Parameters
    ----------
    dtype : dtype
        float32 or float64.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._floats = np.empty(BLOCK, np.float32)
        self._more = np.empty(BLOCK, np.int32)
        self._values = np.empty(BLOCK, dtype)

    def write(self, values: np.ndarray, message: Message) -> None:
        """Round `values` into `message`."""
        end = message.halves.size
        message.exact[:] = values[end:]
        for number, (a, b) in enumerate(blocks(slice(0, end), BLOCK)):
            message.scales[number] = self._round(values[a:b], message.halves[a:b])

    def read(
        self, message: Message, values: np.ndarray, combine: Optional[np.ufunc] = None
    ) -> None:
        """Write what is in `message` to `values`, or let `combine` combine both there."""
        end = message.halves.size
        self._put(message.exact, values[end:], combine)
        for scale, (a, b) in zip(message.scales, blocks(slice(0, end), BLOCK)):
            if combine is None:
                self._widen(message.halves[a:b], scale, values[a:b])
            else:
                block = self._values[: b - a]
                self._widen(message.halves[a:b], scale, block)
                self._put(block, values[a:b], combine)

    @staticmethod
    def _put(block: np.ndarray, values: np.ndarray, combine: Optional[np.ufunc]) -> None:
        if combine is None:
            values[:] = block
        else:
            combine(block, values, out=values)

    def _round(self, values: np.ndarray, halves: np.ndarray) -> float:
        """Write the half floats of one block; return by what they were multiplied."""
        peak, is_finite = _peak(values)
        # The largest power whose inverse is no subnormal number either.
        most = np.finfo(self._dtype).maxexp - 2
        scale = self._dtype.type(math.ldexp(1.0, min(_TOP - math.frexp(peak)[1], most)))
        floats, more = self._floats[: values.size], self._more[: values.size]
        np.multiply(values, scale, out=floats, casting="same_kind")
        if not is_finite:
            halves.view(np.float16)[:] = floats
            return -float(scale)
        np.multiply(floats, _DOWN, out=floats)
        bits = floats.view(np.int32)
        # To the nearest, of two as near to the even one: add half a unit, less one if even.
        np.right_shift(bits, _PLACES, out=more)
        np.bitwise_and(more, 1, out=more)
        np.add(more, (1 << _PLACES - 1) - 1, out=more)
        np.add(more, bits, out=more)
        np.right_shift(more, _PLACES, out=more)
        np.right_shift(bits, 16, out=bits)
        np.bitwise_and(bits, _SIGN, out=bits)
        np.bitwise_or(more, bits, out=more)
        halves[:] = more  # the lower bits
        return float(scale)

    def _widen(self, halves: np.ndarray, scale: np.floating, values: np.ndarray) -> None:
        """Write the values of one block of half floats."""
        floats = self._floats[: halves.size]
        if scale < 0:
            floats[:] = halves.view(np.float16)
        else:
            bits = floats.view(np.int32)
            bits[:] = halves
            np.left_shift(bits, _PLACES, out=bits)
            np.bitwise_and(bits, _NO_SIGNS, out=bits)
            np.multiply(floats, _UP, out=floats)
        np.multiply(floats, 1 / abs(scale), out=values, dtype=self._dtype)


def _peak(values: np.ndarray) -> tuple:
    """The largest finite magnitude, and whether all are finite."""
    high, low = float(values.max()), float(values.min())
    peak = high if high > -low else -low  # NaN if there is one
    if math.isfinite(peak):
        return peak, True
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max(initial=0)), False
