"""``host_staged``: over the CPU, for GPUs that cannot reach each other.

Chunk by chunk, a process combines the vectors of its devices on the first of them and copies the
result into pinned host memory that the ranks of the machine share; there the collective for host
memory that ``auto`` takes is made in place, and the result is copied to all devices. The copies of
one chunk run while the host works on another. Sums travel in the type in which they are made, so
that float16 is rounded once.
"""

from __future__ import annotations

from typing import Any, Dict, List

import numpy as np

from .devices import Queue, address, device_of, load
from .kernels import Launch, narrowing, widening
from .operations import accumulator
from .parts import blocks, part
from .pipeline import Pipeline, Step
from .registry import Run, Task, register

__all__ = ["CHUNK_BYTES", "allgather", "allreduce", "broadcast", "reduce_scatter"]

# Long enough for the bus to be at its full speed, short enough that the first and the last chunk,
# whose copies nothing hides, are a small part of a vector.
CHUNK_BYTES = 4 << 20


class _Reduction:
    """What a process does with chunks on its devices.

    Parameters
    ----------
    task : Task
    pipeline : Pipeline
    length : int
        Of the longest chunk.
    """

    def __init__(self, task: Task, pipeline: Pipeline, length: int) -> None:
        self._task, self._op, self._queue, self._ups = task, task.op, pipeline.down, pipeline.up
        self._dtype, self._sums = task.array.dtype, pipeline.dtype
        # Vectors of other devices are copied to the first, which needs no access to theirs.
        self._copies = {
            number: _scratch(self._queue, length * self._dtype.itemsize)
            for number, vector in enumerate(task.vectors)
            if device_of(vector) != self._queue.device
        }
        self._total = _scratch(self._queue, length * self._sums.itemsize)
        room, tail = length * self._sums.itemsize, max(1, task.op.tail) * self._sums.itemsize
        self._results = {device: _scratch(queue, room) for device, queue in self._ups.items()}
        self._tails = {device: _scratch(queue, tail) for device, queue in self._ups.items()}

    def down(self, chunk: slice, target: np.ndarray) -> List[Step]:
        """Combine `chunk` of all vectors of this process and copy it to the host."""
        steps: List[Step] = []
        sources = [self._at(vector, chunk) for vector in self._task.vectors]
        for number, copy in self._copies.items():
            steps.append(
                _copying(self._queue, int(copy.ptr), sources[number], target.size, self._dtype)
            )
            sources[number] = int(copy.ptr)
        total = sources[0]
        if len(sources) > 1 or self._dtype != self._sums:
            total = int(self._total.ptr)
            kernel = widening(self._dtype, self._op)
            steps.append(Launch(kernel, sources, [total], target.size, self._queue))
        steps.append(_copying(self._queue, target.ctypes.data, total, target.size, self._sums))
        return steps

    def up(self, chunk: slice, source: np.ndarray) -> List[Step]:
        """Copy the result to each device, and divide it on the way into the vectors."""
        steps: List[Step] = []
        is_tail = chunk.start >= self._task.array.size - self._op.tail
        for device, queue in self._ups.items():
            own = [v for v in self._task.vectors if device_of(v) == device]
            targets = [self._at(vector, chunk) for vector in own]
            tail = int(self._tails[device].ptr)
            result = tail if is_tail else int(self._results[device].ptr)
            steps.append(_copying(queue, result, source.ctypes.data, source.size, self._sums))
            by = {} if is_tail else self._by(tail)
            kernel = narrowing(self._dtype)
            steps.append(Launch(kernel, [result], targets, source.size, queue, **by))
        return steps

    def _at(self, vector: Any, chunk: slice) -> int:
        return address(vector) + chunk.start * self._dtype.itemsize

    def _by(self, tail: int) -> Dict[str, Any]:
        if not self._op.divides:
            return {}
        return {"weight": tail} if self._op.tail else {"divisor": float(self._task.count)}


def _scratch(queue: Queue, nbytes: int) -> Any:
    with queue.current():
        return load().cuda.alloc(nbytes)


def _copying(queue: Queue, target: int, source: int, size: int, dtype: np.dtype) -> Step:
    return lambda: queue.copy(target, source, size * dtype.itemsize)


@register("reduce_scatter", "host_staged", memory="device")
@register("allreduce", "host_staged", memory="device", compresses=True)
def allreduce(task: Task) -> Run:
    """Reduce chunk by chunk; a reduce_scatter is a part of it."""
    size, sums = task.array.size, accumulator(task.array.dtype)
    length = min(max(task.op.tail, CHUNK_BYTES // sums.itemsize), size)
    pipeline = Pipeline(task, "allreduce", sums, length)
    work, end = _Reduction(task, pipeline, length), size - task.op.tail
    # The tail first: all others are divided by the weight in it.
    chunks = [slice(end, size)] if task.op.tail else []
    chunks += [slice(*chunk) for chunk in blocks(slice(0, end), length)]
    for chunk in chunks:
        buffer = pipeline.next_buffer(chunk.stop - chunk.start)
        compresses = task.compresses and chunk.stop <= end
        pipeline.add(buffer.size, work.down(chunk, buffer), work.up(chunk, buffer), compresses)
    return pipeline.run


reduce_scatter = allreduce


@register("broadcast", "host_staged", memory="device")
def broadcast(task: Task) -> Run:
    """Copy the root's first vector to the host, broadcast it there, copy it to all."""
    size, dtype = task.array.size, task.array.dtype
    length = min(CHUNK_BYTES // dtype.itemsize, size)
    pipeline = Pipeline(task, "broadcast", dtype, length)
    for chunk in (slice(*chunk) for chunk in blocks(slice(0, size), length)):
        buffer = pipeline.next_buffer(chunk.stop - chunk.start)
        offset, down = chunk.start * dtype.itemsize, []
        if task.comm.rank == task.root:
            source = address(task.array) + offset
            down.append(_copying(pipeline.down, buffer.ctypes.data, source, buffer.size, dtype))
        pipeline.add(buffer.size, down, _to_all(task, pipeline, offset, buffer))
    return pipeline.run


@register("allgather", "host_staged", memory="device")
def allgather(task: Task) -> Run:
    """Copy the own part to the host, gather there, copy everything back; in one piece."""
    size, dtype = task.array.size, task.array.dtype
    pipeline = Pipeline(task, "allgather", dtype, size, buffers=1)
    buffer, own = pipeline.next_buffer(size), part(size, task.comm.rank, task.comm.size)
    source = address(task.array) + own.start * dtype.itemsize
    mine = buffer[own]
    down = [_copying(pipeline.down, mine.ctypes.data, source, mine.size, dtype)]
    pipeline.add(size, down, _to_all(task, pipeline, 0, buffer))
    return pipeline.run


def _to_all(task: Task, pipeline: Pipeline, offset: int, source: np.ndarray) -> List[Step]:
    """Steps that copy `source` to `offset` bytes behind the start of each vector."""
    return [
        _copying(
            pipeline.up[device_of(vector)],
            address(vector) + offset,
            source.ctypes.data,
            source.size,
            source.dtype,
        )
        for vector in task.vectors
    ]
