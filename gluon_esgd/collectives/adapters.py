"""What lets an algorithm take more than it knows of: each function makes another ``prepare``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .operations import accumulator
from .registry import Prepare, Run, Task

__all__ = ["announced", "for_group", "in_float32"]


def announced(prepare: Prepare) -> Prepare:
    """Let ranks say where they are before messages, and look afterwards whether all were there.

    Algorithms in shared memory do so themselves, since they look before they write.
    """

    def wrapped(task: Task) -> Run:
        comm, inner = task.comm, prepare(task)

        def run(what: str) -> None:
            comm.enter(what)
            inner(what)
            comm.check_same(what)

        return run

    return wrapped


def in_float32(prepare: Prepare) -> Prepare:
    """Let float16 vectors be added up in float32."""

    def wrapped(task: Task) -> Run:
        half, wide = task.array, np.empty(task.array.size, accumulator(task.array.dtype))
        inner = prepare(replace(task, vectors=[wide], home=None))

        def run(what: str) -> None:
            np.copyto(wide, half)
            inner(what)
            np.copyto(half, wide, casting="same_kind")

        return run

    return wrapped


def for_group(prepare: Prepare, reduces: bool) -> Prepare:
    """Let the vectors of several devices in host memory take part by the first of them."""

    def wrapped(task: Task) -> Run:
        first, others = task.vectors[0], task.vectors[1:]
        inner = prepare(replace(task, vectors=[first]))

        def run(what: str) -> None:
            for other in others if reduces else ():
                task.op.combine(first, other, out=first)
            inner(what)
            for other in others:
                np.copyto(other, first)

        return run

    return wrapped
