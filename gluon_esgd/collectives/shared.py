"""``shared``: the ranks of one machine reduce vectors that all of them map.

Rank ``r`` of ``n`` combines part ``r`` of all vectors, block by block in cache, and writes the
result into all of them. Each byte is read once and written once, the least that any in-place
allreduce can do, and no message is copied. Every element is combined in the order of ranks 0, 1,
..., so its bits depend neither on the number of parts nor on who made it.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import numpy as np

from .operations import Operation, accumulator
from .parts import blocks, part
from .registry import Run, Task, register

__all__ = ["Reduction", "allgather", "allreduce", "broadcast", "reduce_scatter"]

# What the blocks of all vectors together take of a core's cache.
_CACHE_BYTES = 1 << 19


class Reduction:
    """A part of the vectors of a machine's ranks, combined by one of them.

    Parameters
    ----------
    vectors : sequence of ndarray, shape (n,)
        That part, by local rank; the first is used up on the way.
    op : Operation
    into : sequence of ndarray, shape (n,)
        Where results go; some or all of `vectors`, or memory elsewhere.
    """

    def __init__(
        self, vectors: Sequence[np.ndarray], op: Operation, into: Sequence[np.ndarray]
    ) -> None:
        self._op, dtype = op, vectors[0].dtype
        length = max(1, _CACHE_BYTES // (len(vectors) * dtype.itemsize))
        sums = accumulator(dtype)
        self._scratch = None
        if sums == dtype:
            # The total is made in the first vector, and need not be copied there.
            into = [v for v in into if v.ctypes.data != vectors[0].ctypes.data]
        else:
            self._scratch = np.empty(length, sums)
        first, *others = vectors
        self._blocks = [
            (first[a:b], [v[a:b] for v in others], [v[a:b] for v in into])
            for a, b in blocks(slice(0, first.size), length)
        ]

    def run(self, divisor: Optional[float]) -> None:
        """Combine, divide by `divisor` where there is one, and write."""
        combine, scratch = self._op.combine, self._scratch
        for total, others, into in self._blocks:
            if scratch is not None:
                first, total = total, scratch[: total.size]
                total[:] = first
            for other in others:
                combine(total, other, total)
            if divisor is not None:
                self._op.divide(total, divisor)
            # Slices take a third of the time of np.copyto, which counts in small vectors.
            for result in into:
                result[:] = total
                total = result  # rounded once


@register("allreduce", "shared", memory="node")
def allreduce(task: Task) -> Run:
    """Reduce a part on each rank and write it to all."""
    comm, op, array, vectors = task.comm, task.op, task.array, task.on_node()
    end = array.size - op.tail
    own = part(end, comm.local_rank, comm.local_size)
    parts = [vector[own] for vector in vectors]
    reduction = Reduction(parts, op, parts)
    tails = [vector[end:] for vector in vectors]

    def run(what: str) -> None:
        comm.arrive(what)
        tail = np.sum(tails, 0, accumulator(array.dtype)) if op.tail else None
        reduction.run(op.divisor(task.count, tail) if op.divides else None)
        comm.meet(what)
        if op.tail:  # only now has everybody read it
            array[end:] = tail

    return run


@register("reduce_scatter", "shared", memory="node")
def reduce_scatter(task: Task) -> Run:
    """Reduce each rank's own part on it."""
    comm, op = task.comm, task.op
    own = part(task.array.size, comm.local_rank, comm.local_size)
    reduction = Reduction([vector[own] for vector in task.on_node()], op, [task.array[own]])

    def run(what: str) -> None:
        comm.arrive(what)
        reduction.run(op.divisor(task.count))
        comm.meet(what)

    return run


@register("allgather", "shared", memory="node")
def allgather(task: Task) -> Run:
    """Read the parts of the others where they lie."""
    comm, size = task.comm, task.array.size
    spans = [part(size, rank, comm.local_size) for rank in range(comm.local_size)]
    pairs = [
        (task.array[span], vector[span])
        for rank, (span, vector) in enumerate(zip(spans, task.on_node()))
        if rank != comm.local_rank
    ]
    return _copies(task, pairs)


@register("broadcast", "shared", memory="node")
def broadcast(task: Task) -> Run:
    """Read the vector of the root where it lies."""
    vectors = task.on_node()
    return _copies(task, [] if task.comm.rank == task.root else [(task.array, vectors[task.root])])


def _copies(task: Task, pairs: Sequence[Tuple[np.ndarray, np.ndarray]]) -> Run:
    def run(what: str) -> None:
        task.comm.arrive(what)
        for target, source in pairs:
            np.copyto(target, source)
        task.comm.meet(what)

    return run
