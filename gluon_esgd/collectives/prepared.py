"""From a name to a collective that can be run: adapters, and what is taken in place of what."""

from __future__ import annotations

import logging
from typing import Set, Tuple

import numpy as np

from .adapters import announced, for_group, in_float32
from .choice import among_messages
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
    algorithm, window = find(collective, name), None
    if algorithm.memory == "node" and task.home is None:
        window = task.comm.window(WINDOW_BYTES)
        if window is None:
            name = among_messages(collective, task.array.nbytes)
            algorithm = find(collective, name)
    prepare = algorithm.prepare
    if window is not None:
        prepare = staged(collective, prepare, window)
    elif algorithm.memory == "host":
        prepare = announced(prepare)
    reduces = collective in REDUCTIONS
    if task.array.dtype == np.float16 and reduces and not algorithm.half:
        prepare = in_float32(prepare)
    if len(task.vectors) > 1 and algorithm.memory != "device":
        prepare = for_group(prepare, reduces)
    return name, prepare(task)
