"""How the vectors of a network are laid into buckets: pure arithmetic."""

from __future__ import annotations

from typing import List, NamedTuple, Sequence

import numpy as np

__all__ = ["Span", "pack_order"]


class Span(NamedTuple):
    """A bucket: the vectors `indices`, in this order, added up in `dtype`."""

    indices: List[int]
    dtype: str


def pack_order(sizes: Sequence[int], dtypes: Sequence[str], bucket_bytes: int) -> List[Span]:
    """Lay vectors into buckets, last vector first, as the backward pass makes gradients.

    Parameters
    ----------
    sizes : sequence of int
        Elements of each vector, in forward order.
    dtypes : sequence of str
        Their types. Half floats are added up in float32, float64 in itself, and
        vectors of different sums do not share a bucket.
    bucket_bytes : int
        A bucket is closed when it holds at least as many bytes.

    Returns
    -------
    list of Span
        Every vector once; the same on all ranks for the same arguments.
    """
    done: List[Span] = []
    open_: dict = {}
    for index in reversed(range(len(sizes))):
        dtype = "float64" if dtypes[index] == "float64" else "float32"
        span = open_.setdefault(dtype, Span([], dtype))
        span.indices.append(index)
        if sum(sizes[i] for i in span.indices) * np.dtype(dtype).itemsize >= bucket_bytes:
            done.append(open_.pop(dtype))
    return done + list(open_.values())
