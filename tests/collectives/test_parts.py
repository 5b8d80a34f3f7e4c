"""Parts and blocks cover a vector once, in order, and evenly."""

from __future__ import annotations

import pytest

from gluon_esgd.collectives.parts import blocks, part

SIZES = [0, 1, 2, 3, 5, 7, 8, 64, 1000, (1 << 20) + 7, (1 << 40) + 3]


@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("size", SIZES)
def test_parts_cover_a_vector_in_order_and_differ_by_one_at_most(size: int, count: int) -> None:
    parts = [part(size, index, count) for index in range(count)]
    ends = [0, *(p.stop for p in parts)]
    assert [p.start for p in parts] == ends[:-1] and ends[-1] == size
    lengths = [p.stop - p.start for p in parts]
    assert min(lengths) >= 0 and max(lengths) - min(lengths) <= 1
    assert max(lengths) == -(-size // count)


def test_where_there_are_more_parts_than_elements_some_are_empty() -> None:
    lengths = [part(3, i, 8).stop - part(3, i, 8).start for i in range(8)]
    assert sum(lengths) == 3 and set(lengths) == {0, 1}


@pytest.mark.parametrize("length", [1, 2, 3, 7, 100, 1000])
@pytest.mark.parametrize("start", [0, 1, 13])
@pytest.mark.parametrize("size", [0, 1, 2, 6, 7, 8, 100, 101])
def test_blocks_cover_a_span_in_order(size: int, start: int, length: int) -> None:
    found = list(blocks(slice(start, start + size), length))
    ends = [start, *(end for _, end in found)]
    assert [begin for begin, _ in found] == ends[:-1] and ends[-1] == start + size
    lengths = [end - begin for begin, end in found]
    assert len(found) == -(-size // length)
    assert all(n == length for n in lengths[:-1]) and all(0 < n <= length for n in lengths)
