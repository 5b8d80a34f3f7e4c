"""Buckets hold every vector once, last first, and mix no sums."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gluon_esgd.collectives import pack_order


@pytest.mark.parametrize("seed", range(20))
def test_every_vector_once_in_backward_order(seed: int) -> None:
    source = random.Random(seed)
    sizes = [source.randrange(1, 5000) for _ in range(source.randrange(40))]
    dtypes = [source.choice(["float16", "float32", "float64"]) for _ in sizes]
    limit = source.choice([1, 4096, 1 << 20])
    spans = pack_order(sizes, dtypes, limit)
    assert sorted(i for s in spans for i in s.indices) == list(range(len(sizes)))
    for span in spans:
        assert span.indices == sorted(span.indices, reverse=True)
        assert {dtypes[i] == "float64" for i in span.indices} == {span.dtype == "float64"}
        one_less = sum(sizes[i] for i in span.indices[:-1]) * np.dtype(span.dtype).itemsize
        assert one_less < limit, "a bucket is closed as soon as it is large enough"


def test_nothing_gives_no_bucket() -> None:
    assert pack_order([], [], 100) == []
