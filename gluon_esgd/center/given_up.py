"""Boxes of trainers that are gone, closed when the next trainer asks for the link.

A box lives in the link, beside its trainer, and its memory with it. When the trainer is collected
nothing can be said to the agent: the collector may come in any thread, also where it holds the
link's lock. So the box is put aside, and closed by a call of the main thread.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Deque

if TYPE_CHECKING:
    from .face import Box

__all__ = ["close_given_up", "close_with"]

_given_up: Deque[Box] = deque()


def close_with(owner: Any, box: Box) -> weakref.finalize:
    """Let `box` be closed some time after `owner` is gone; `box` must not refer to it.

    Detach what is returned where the box is closed before.
    """
    finalizer = weakref.finalize(owner, _given_up.append, box)
    finalizer.atexit = False  # at the end of the process the link closes all
    return finalizer


def close_given_up() -> None:
    """Close the boxes whose owners are gone; asks nobody and does not wait."""
    while _given_up:
        _given_up.popleft().close()
