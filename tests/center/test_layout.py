"""How the flat center is cut."""

from __future__ import annotations

import pytest

from gluon_esgd.center import AVERAGED, CARRIED, MOVED, even_chunks
from gluon_esgd.center.layout import check_chunks, check_sizes, chunk_range, kind_spans


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, (1 << 20) + 1, 25_557_032])
@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
def test_chunks_tile_and_load_servers_alike(size: int, num_servers: int) -> None:
    largest = 1 << 20
    chunks = even_chunks(size, num_servers, largest)
    assert check_chunks(chunks, size) == chunks
    lengths = [stop - start for start, stop in chunks]
    assert max(lengths) - min(lengths) <= 1 and max(lengths) <= largest
    assert len(chunks) % num_servers == 0 or len(chunks) == size < num_servers
    assert len(chunks) < size / largest + num_servers or len(chunks) == size


@pytest.mark.parametrize("arguments", [(0, 1), (5, 0), (5, 1, 0)])
def test_chunks_of_nothing_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="=0 must be at least 1"):
        even_chunks(*arguments)


def test_chunks_take_ints_only() -> None:
    with pytest.raises(TypeError, match=r"size=2\.5 must be an int"):
        even_chunks(2.5, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([(0, 3), (4, 5)], r"\(4, 5\) where a chunk must begin at 3"),
        ([(0, 3), (3, 3), (3, 5)], r"\(3, 3\)"),
        ([(0, 3)], "end at 3 but sizes add up to 5"),
        ([], "end at 0"),
    ],
)
def test_chunks_that_do_not_tile(chunks: list, said: str) -> None:
    with pytest.raises(ValueError, match=said + r".*even_chunks\(5, num_servers\)"):
        check_chunks(chunks, 5)


def test_sizes() -> None:
    assert check_sizes((3, 1)) == [3, 1]
    with pytest.raises(ValueError, match=r"sizes\[1\]=0 must be"):
        check_sizes([2, 0])
    with pytest.raises(ValueError, match=r"sizes=\[\] must be"):
        check_sizes([])


def test_chunk_range() -> None:
    chunks = even_chunks(10, 3)
    assert chunk_range(chunks, 0, 10) == (0, 3)
    assert chunk_range(chunks, 3, 6) == (1, 2)
    for start, stop in [(1, 10), (0, 5), (3, 3), (6, 3), (0, 11)]:
        with pytest.raises(ValueError, match=rf"\[{start}, {stop}\) must be made of whole chunks"):
            chunk_range(chunks, start, stop)


def test_kind_spans_join_neighbours_and_stay_short() -> None:
    sizes, kinds = [5, 4, 3, 2], [MOVED, MOVED, AVERAGED, CARRIED]
    assert kind_spans(sizes, kinds) == [(MOVED, 0, 9), (AVERAGED, 9, 12), (CARRIED, 12, 14)]
    spans = kind_spans(sizes, kinds, largest=4)
    assert spans[:3] == [(MOVED, 0, 4), (MOVED, 4, 8), (MOVED, 8, 9)]
    assert [span[1] for span in spans[1:]] == [span[2] for span in spans[:-1]]
