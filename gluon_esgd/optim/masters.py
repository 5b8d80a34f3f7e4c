"""Where an optimizer keeps the fp32 master of a half-precision weight."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet.optimizer import Optimizer

__all__ = ["master_weight"]


def master_weight(optimizer: Optimizer, weight: mx.nd.NDArray, state: Any) -> mx.nd.NDArray:
    """Return the array that the next update starts from: the fp32 master, or `weight`.

    An exchange has to move this one; a half-precision weight alone would be
    overwritten from its master.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
    weight : NDArray
    state : object
        What ``optimizer.create_state_multi_precision`` made for `weight`.
    """
    if not optimizer.multi_precision or weight.dtype != np.float16 or state is None:
        return weight
    kind = type(optimizer).create_state_multi_precision
    # The base class keeps (master, state); SGD, NAG, LARS and others (state, master).
    position = 0 if kind is Optimizer.create_state_multi_precision else -1
    return state[position]
