"""How the flat center is cut: chunks over the servers, spans over the kinds of parameters."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import numpy as np

__all__ = [
    "AVERAGED",
    "CARRIED",
    "MOVED",
    "check_chunks",
    "check_exact",
    "check_out",
    "check_sizes",
    "checked_kinds",
    "chunk_range",
    "chunks_of",
    "even_chunks",
    "kind_spans",
]

MOVED, AVERAGED, CARRIED = 0, 1, 2

_BLOCK = 1 << 16  # floats; a few such vectors fit into a core's cache together


def even_chunks(size: int, num_servers: int, largest: int = 1 << 20) -> List[Tuple[int, int]]:
    """Cut ``range(size)`` into spans that load all servers alike.

    Parameters
    ----------
    size : int
        Floats in the center.
    num_servers : int
        Servers that hold it; chunk `i` goes to the next server after that of chunk ``i - 1``.
    largest : int, default 2**20
        Floats that a chunk has at most.

    Returns
    -------
    list of (start, stop)
        As few spans as `largest` allows, their number a multiple of `num_servers` (or `size`,
        where that is less); their sizes differ by at most 1.
    """
    for name, value in (("size", size), ("num_servers", num_servers), ("largest", largest)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be an int")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    rounds = -(-size // (largest * num_servers))
    count = min(rounds * num_servers, size)
    return [(size * i // count, size * (i + 1) // count) for i in range(count)]


def chunks_of(
    parts: Sequence[Tuple[int, bool]], num_servers: int, largest: int = 1 << 20
) -> Tuple[List[Tuple[int, int]], List[bool]]:
    """Cut consecutive parts of a vector, each evenly, so that each is made of whole chunks.

    Parameters
    ----------
    parts : sequence of (size, exact)
        Sizes may be 0; see `CenterLink.attach` for `exact`.
    num_servers : int
    largest : int, default 2**20
        See `even_chunks`.

    Returns
    -------
    chunks : list of (start, stop)
    exact : list of bool
        That of the part, for each chunk.
    """
    chunks: List[Tuple[int, int]] = []
    flags: List[bool] = []
    start = 0
    for size, exact in parts:
        spans = even_chunks(size, num_servers, largest) if size else []
        chunks += [(start + a, start + b) for a, b in spans]
        flags += [exact] * len(spans)
        start += size
    return chunks, flags


def check_sizes(sizes: Sequence[int]) -> List[int]:
    """Return `sizes` as plain ints, or raise ValueError unless each is at least 1."""
    plain = [int(size) for size in sizes]
    faulty = [i for i, size in enumerate(plain) if size < 1]
    if faulty or not plain:
        what = f"sizes[{faulty[0]}]={plain[faulty[0]]}" if faulty else "sizes=[]"
        raise ValueError(f"{what} must be at least one parameter of at least one float each")
    return plain


def check_chunks(chunks: Sequence[Tuple[int, int]], size: int) -> List[Tuple[int, int]]:
    """Return `chunks` as plain ints, or raise ValueError unless they tile ``range(size)``."""
    plain = [(int(start), int(stop)) for start, stop in chunks]
    end = 0
    for start, stop in plain:
        if start != end or stop <= start:
            raise ValueError(
                f"chunks has ({start}, {stop}) where a chunk must begin at {end} and not be "
                f"empty; even_chunks({size}, num_servers) makes a list that fits"
            )
        end = stop
    if end != size:
        raise ValueError(
            f"chunks end at {end} but sizes add up to {size}; "
            f"even_chunks({size}, num_servers) makes a list that fits"
        )
    return plain


def check_out(out: Any, n: int) -> None:
    """Raise unless `out` can receive a flat center of `n` floats."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array, not {type(out).__name__}")
    if out.dtype != np.float32 or out.shape != (n,) or not out.flags.writeable:
        raise ValueError(
            f"out is {out.dtype} of shape {out.shape}, writeable={out.flags.writeable}; "
            f"it must be a writeable float32 array of shape ({n},): "
            f"numpy.empty({n}, 'float32')"
        )


def checked_kinds(kinds: Any, count: int) -> np.ndarray:
    """Return `kinds` as an array, or raise ValueError unless it has one for each parameter."""
    found = np.asarray(kinds)
    if found.shape != (count,) or found.dtype.kind not in "iu":
        raise ValueError(
            f"kinds is {found.dtype} of shape {found.shape}; it must be integers of shape "
            f"({count},), one for each parameter"
        )
    faulty = np.flatnonzero((found < MOVED) | (found > CARRIED))
    if faulty.size:
        raise ValueError(
            f"kinds[{faulty[0]}]={found[faulty[0]]} must be MOVED ({MOVED}), "
            f"AVERAGED ({AVERAGED}) or CARRIED ({CARRIED})"
        )
    return found


def check_exact(exact: Sequence[bool], count: int) -> List[bool]:
    """Return `exact` for each of `count` chunks, false where none is given, or raise ValueError."""
    if len(exact) not in (0, count):
        raise ValueError(
            f"exact has {len(exact)} entries for {count} chunks; give one for each, or none"
        )
    return [bool(flag) for flag in exact] or [False] * count


def chunk_range(chunks: Sequence[Tuple[int, int]], start: int, stop: int) -> Tuple[int, int]:
    """Return the numbers ``first, last + 1`` of the chunks that make up ``[start, stop)``.

    Raises
    ------
    ValueError
        Where ``[start, stop)`` is empty or cuts a chunk.
    """
    starts = {chunk[0]: i for i, chunk in enumerate(chunks)}
    stops = {chunk[1]: i + 1 for i, chunk in enumerate(chunks)}
    first, last = starts.get(start), stops.get(stop)
    if first is None or last is None or first >= last:
        raise ValueError(
            f"[start, stop) = [{start}, {stop}) must be made of whole chunks: begin where one "
            f"begins and end where one ends (there are {len(chunks)} over [0, {chunks[-1][1]}), "
            f"the first ends at {chunks[0][1]})"
        )
    return first, last


def kind_spans(
    sizes: Sequence[int], kinds: Sequence[int], largest: int = _BLOCK
) -> List[Tuple[int, int, int]]:
    """Return ``(kind, start, stop)`` in order; neighbours of one kind are one span.

    Spans longer than `largest` are cut, so that work span by span stays in cache.
    """
    runs: List[Tuple[int, int, int]] = []
    end = 0
    for size, kind in zip(sizes, kinds):
        start, end = end, end + size
        if runs and runs[-1][0] == kind:
            start = runs.pop()[1]
        runs.append((kind, start, end))
    return [
        (kind, at, min(at + largest, stop))
        for kind, start, stop in runs
        for at in range(start, stop, largest)
    ]
