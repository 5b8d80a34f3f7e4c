"""``library``: what the MPI library itself does, with a bounded wait."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..communicator import movable
from .parts import part
from .registry import Run, Task, register

__all__ = ["allgather", "allreduce", "broadcast", "reduce_scatter"]


@register("allreduce", "library")
def allreduce(task: Task) -> Run:
    """``MPI_Iallreduce``."""
    comm, array, op = task.comm, task.array, _mpi_op(task.op.name, task.array.dtype.kind)
    in_place = _mpi().IN_PLACE

    def run(what: str) -> None:
        comm.wait([comm.mpi.Iallreduce(in_place, array, op)], what)
        task.op.finish(array, task.count)

    return run


@register("reduce_scatter", "library")
def reduce_scatter(task: Task) -> Run:
    """``MPI_Ireduce_scatter``; ranks keep their own part."""
    comm, array, op = task.comm, task.array, _mpi_op(task.op.name, task.array.dtype.kind)
    own = part(array.size, comm.rank, comm.size)
    received = np.empty(own.stop - own.start, array.dtype)
    counts = [_length(part(array.size, rank, comm.size)) for rank in range(comm.size)]

    def run(what: str) -> None:
        comm.wait([comm.mpi.Ireduce_scatter(array, received, counts, op)], what)
        array[own] = received
        task.op.divide(array[own], task.op.divisor(task.count))

    return run


@register("allgather", "library")
def allgather(task: Task) -> Run:
    """``MPI_Iallgatherv``."""
    comm, wire = task.comm, movable(task.array)
    parts = [part(wire.size, rank, comm.size) for rank in range(comm.size)]
    spans = ([_length(p) for p in parts], [p.start for p in parts])

    def run(what: str) -> None:
        comm.wait([comm.mpi.Iallgatherv(_mpi().IN_PLACE, [wire, spans, _type(wire)])], what)

    return run


@register("broadcast", "library")
def broadcast(task: Task) -> Run:
    """``MPI_Ibcast``."""
    comm, wire = task.comm, movable(task.array)
    return lambda what: comm.wait([comm.mpi.Ibcast(wire, task.root)], what)


def _length(span: slice) -> int:
    return span.stop - span.start


def _type(array: np.ndarray) -> Any:
    from mpi4py.util import dtlib

    return dtlib.from_numpy_dtype(array.dtype)


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


@lru_cache(maxsize=None)
def _mpi_op(name: str, kind: str) -> Any:
    """The library's own operation; for floats its MIN and MAX may lose NaN, so there ours."""
    MPI = _mpi()
    if name not in ("min", "max"):
        return MPI.SUM
    if kind != "f":
        return MPI.MIN if name == "min" else MPI.MAX
    combine = np.minimum if name == "min" else np.maximum

    def into(given: Any, result: Any, datatype: Any) -> None:
        from mpi4py.util import dtlib

        dtype = dtlib.to_numpy_dtype(datatype)
        mine = np.frombuffer(result, dtype)
        combine(np.frombuffer(given, dtype), mine, out=mine)

    return MPI.Op.Create(into, commute=False)  # else ranks may differ in the sign of 0 and NaN
