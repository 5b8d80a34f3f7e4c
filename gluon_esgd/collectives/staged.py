"""Vectors in private memory go through a small window of shared memory, chunk by chunk.

A chunk fits a cache, so that memory itself sees one read and one write of the vector, as where it
lies in shared memory for good.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Tuple

import numpy as np

from ..node_memory import Mapping
from .parts import blocks, part
from .registry import Prepare, Run, Task, find

__all__ = ["WINDOW_BYTES", "staged"]

WINDOW_BYTES = 1 << 20


def staged(collective: str, prepare: Prepare, window: Mapping) -> Prepare:
    """Let a collective in shared memory take a vector that does not lie there.

    Parameters
    ----------
    collective : str
    prepare : callable
        The algorithm for vectors that ranks of a machine share.
    window : Mapping
        At least `WINDOW_BYTES` for each rank.
    """
    if collective == "allgather":
        return lambda task: _allgather(task, window)
    if collective == "reduce_scatter":
        # Parts of the vector are not parts of its chunks; an allreduce gives them all.
        prepare = find("allreduce", "shared").prepare

    def wrapped(task: Task) -> Run:
        array, buffer = task.array, _windows(window, task)[window.own]
        # Where floats are compressed a tail is not: it is a chunk of its own.
        end = array.size - (task.op.tail if task.compresses else 0)
        spans = [(slice(0, end), task.compresses), (slice(end, array.size), False)]
        chunks = [
            (slice(*chunk), compresses)
            for span, compresses in spans
            for chunk in blocks(span, buffer.size)
        ]
        runs: Dict[Tuple[int, bool], Run] = {}
        for chunk, compresses in chunks:
            size = chunk.stop - chunk.start
            if (size, compresses) not in runs:
                inside = replace(
                    task,
                    vectors=[buffer[:size]],
                    home=window,
                    op=task.op.bare,
                    compresses=compresses,
                )
                runs[size, compresses] = prepare(inside)

        def run(what: str) -> None:
            for chunk, compresses in chunks:
                inside, outside = buffer[: chunk.stop - chunk.start], array[chunk]
                np.copyto(inside, outside)
                runs[inside.size, compresses](what)
                np.copyto(outside, inside)
            task.op.finish(array, task.count)

        return run

    return wrapped


def _windows(window: Mapping, task: Task) -> List[np.ndarray]:
    return [part[:WINDOW_BYTES].view(task.array.dtype) for part in window.parts]


def _allgather(task: Task, window: Mapping) -> Run:
    array, comm, windows = task.array, task.comm, _windows(window, task)
    chunks = [slice(*chunk) for chunk in blocks(slice(0, array.size), windows[0].size)]
    spans = [part(array.size, rank, comm.local_size) for rank in range(comm.local_size)]
    # For each chunk and rank: where its part of the chunk lies, outside and in its window.
    places = [
        [
            (array[both], window[both.start - chunk.start : both.stop - chunk.start])
            for both, window in ((_common(span, chunk), w) for span, w in zip(spans, windows))
        ]
        for chunk in chunks
    ]

    def run(what: str) -> None:
        for chunk in places:
            outside, inside = chunk[comm.local_rank]
            np.copyto(inside, outside)
            comm.arrive(what)
            for rank, (outside, inside) in enumerate(chunk):
                if rank != comm.local_rank:
                    np.copyto(outside, inside)
            comm.meet(what)

    return run


def _common(a: slice, b: slice) -> slice:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return slice(start, max(start, stop))
