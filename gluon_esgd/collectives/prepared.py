"""From a name to a collective that can be run: adapters, and what is taken in place of what."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Set, Tuple

import numpy as np

from .adapters import announced, by_one
from .choice import among_messages
from .memory import window
from .registry import REDUCTIONS, Instead, Run, Task, find
from .staged import WINDOW_BYTES, staged

__all__ = ["prepared"]

_log = logging.getLogger(__name__)
_told: Set[str] = set()


def prepared(collective: str, name: str, task: Task) -> Tuple[str, Run]:
    """Return the algorithm that is taken in the end, and how to run it; collective."""
    try:
        return _prepared(collective, name, task)
    except Instead as other:
        if task.comm.rank == 0 and other.reason not in _told:
            _told.add(other.reason)
            _log.warning("%s in place of %s: %s", other.name, name, other.reason)
        return _prepared(collective, other.name, task)


def _prepared(collective: str, name: str, task: Task) -> Tuple[str, Run]:
    algorithm, reduces = find(collective, name), collective in REDUCTIONS
    if algorithm.memory == "device":
        return name, algorithm.prepare(task)
    # Half floats are rounded once: also where ranks have several, and at the end of all chunks.
    wide = reduces and task.array.dtype == np.float16
    if algorithm.memory == "node" and task.home is not None and task.count == task.comm.size:
        wide = False
    if wide:
        task = replace(task, home=None)
    between = None
    if algorithm.memory == "node" and task.home is None:
        between = window(WINDOW_BYTES, task.comm)
        if between is None:
            name = among_messages(collective, task.array.nbytes, task.compresses)
            algorithm = find(collective, name)
    prepare = algorithm.prepare
    if between is not None:
        prepare = staged(collective, prepare, between)
    elif algorithm.memory == "host":
        prepare = announced(prepare)
    if wide or len(task.vectors) > 1 or not task.array.flags.aligned:
        prepare = by_one(prepare, reduces, wide)
    return name, prepare(task)
