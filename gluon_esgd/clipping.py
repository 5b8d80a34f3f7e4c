"""The global norm of gradients that all ranks and devices hold alike."""

from __future__ import annotations

import logging
import math
import numbers
from typing import Any, List, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .engine import Lane, view

__all__ = ["Clipping", "checked_norm", "global_norm", "scale"]

_log = logging.getLogger(__name__)

_BLOCK = 1 << 16  # elements that are squared at once, so that their float64 copy stays in cache


class Clipping:
    """The limits that a trainer's gradients were clipped to since its last update.

    Parameters
    ----------
    params : sequence of Parameter
        The trainer's.
    lane : Lane
    aloud : bool
        Whether this rank says what concerns all of them.
    """

    def __init__(self, params: Sequence[Parameter], lane: Lane, aloud: bool) -> None:
        self._params, self._lane, self._aloud = params, lane, aloud
        self.norms: List[float] = []

    def clip(self, limit: float) -> float:
        """Scale gradients to a global norm of at most `limit`; return the norm before; waits."""
        trainable = [param for param in self._params if param.grad_req != "null"]
        norm = global_norm(trainable)
        self._lane.check()  # what failed there left numbers of no meaning
        self.norms.append(limit)
        if not math.isfinite(norm):
            self._tell_not_finite(norm)
        elif norm > limit:
            scale(trainable, limit / norm)
        return norm

    def _tell_not_finite(self, norm: float) -> None:
        if self._aloud:
            _log.warning("clip_global_norm: the norm is %s; gradients stay as they are", norm)
        self._aloud = False  # once is enough


def checked_norm(max_norm: Any) -> float:
    """Return `max_norm` as a float; ValueError unless it is a number above 0."""
    limit = float(max_norm) if isinstance(max_norm, numbers.Real) else math.nan
    if not limit > 0:
        raise ValueError(f"max_norm={max_norm!r} must be a number above 0")
    return limit


def global_norm(params: Sequence[Parameter]) -> float:
    """Return the L2 norm of the gradients of all `params` on their first devices; waits.

    Sums of squares in float64, always in the same order: ranks that hold the same
    gradients get the same bits, whatever their threads and wherever the arrays lie.
    """
    firsts = [_values(param.list_grad()[0]) for param in params]
    here = [grad for grad in firsts if grad.context.device_type == "cpu"]
    squares = _on_devices([grad for grad in firsts if grad.context.device_type != "cpu"])
    return math.sqrt(sum(map(_on_cpu, here)) + sum(squares))


def _values(grad: mx.nd.NDArray) -> mx.nd.NDArray:
    """What is not zero of a gradient that keeps its rows only (sparse, in a lone process)."""
    return grad.data if grad.stype == "row_sparse" else grad


def _on_cpu(grad: mx.nd.NDArray) -> float:
    grad.wait_to_read()
    flat = view(grad)
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is the result
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK].astype(np.float64)
            total += float(np.add.reduce(block * block))
    return total


def _on_devices(grads: Sequence[mx.nd.NDArray]) -> List[float]:
    pending = [mx.nd.multi_sum_sq(grad, num_arrays=1) for grad in grads]
    return [float(square.asscalar()) for square in pending]


def scale(params: Sequence[Parameter], factor: float) -> None:
    """Push a multiplication of the gradients of all `params`, on all devices, by `factor`."""
    for param in params:
        for grad in param.list_grad():
            grad *= factor
