"""When the network has done what it was given: what input is waited for is counted from there."""

from __future__ import annotations

import time
from typing import List, Optional, Sequence

from mxnet import nd
from mxnet.gluon import Trainer

from ..engine import Lane

__all__ = ["End", "arrays_of"]

_lane: Optional[Lane] = None  # not that of the collectives, which a mark must not hold up


class End:
    """When all that is pending on some arrays is done; making one does not wait.

    Attributes
    ----------
    time : float
        On the monotonic clock, infinite as long as it is not done. The mark is made in Python, so
        a thread that keeps the interpreter delays it, by 5 ms at most.
    """

    def __init__(self, arrays: Sequence[nd.NDArray]) -> None:
        global _lane
        self.time = float("inf") if arrays else 0.0
        if arrays:
            _lane = _lane or Lane()
            _lane.push(self._mark, "end of a step", arrays)

    def _mark(self) -> None:
        self.time = time.monotonic()


def arrays_of(trainer: Trainer) -> List[nd.NDArray]:
    """Return what a step writes: weights and gradients, without waiting for them."""
    trained = [param for param in trainer._params if param.grad_req != "null"]
    return [array for p in trained for array in (*(p._data or ()), *(p._grad or ()))]
