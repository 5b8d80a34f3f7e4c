"""Cutting vectors into the parts that ranks own, and into blocks that fit a cache."""

from __future__ import annotations

from typing import Iterator, Tuple

__all__ = ["blocks", "part"]


def part(size: int, index: int, count: int) -> slice:
    """Return where part `index` of `count` lies in a vector of `size` elements.

    Parts are contiguous, in order, and differ by one element at most; they are empty where there
    are more parts than elements.
    """
    return slice(size * index // count, size * (index + 1) // count)


def blocks(span: slice, length: int) -> Iterator[Tuple[int, int]]:
    """Yield begin and end of blocks of at most `length` elements that make up `span`."""
    for begin in range(span.start, span.stop, length):
        yield begin, min(begin + length, span.stop)
