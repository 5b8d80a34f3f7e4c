"""What lets an algorithm take more than it knows of: each function makes another ``prepare``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .operations import accumulator
from .registry import Prepare, Run, Task

__all__ = ["announced", "by_one"]


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


def by_one(prepare: Prepare, reduces: bool, wide: bool) -> Prepare:
    """Let all vectors of this process in host memory take part by one.

    Parameters
    ----------
    prepare : callable
    reduces : bool
        Whether the collective is a reduction: then the one is that of all vectors.
    wide : bool
        Whether the one is of the type in which they are added up.
    """

    def wrapped(task: Task) -> Run:
        first, *others = task.vectors
        one = first
        if wide or not first.flags.aligned:
            one = np.empty(first.size, accumulator(first.dtype) if wide else first.dtype)
        targets = others if one is first else task.vectors
        inner = prepare(replace(task, vectors=[one]))

        def run(what: str) -> None:
            if one is not first:
                np.copyto(one, first)
            for other in others if reduces else ():
                task.op.combine(one, other, out=one)
            inner(what)
            for target in targets:
                np.copyto(target, one, casting="same_kind")

        return run

    return wrapped
