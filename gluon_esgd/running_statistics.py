"""Running statistics of a network: every device of every rank gathers its own."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .collectives import agree, allreduce
from .communicator import Communicator
from .parameters import classic, device_mean, is_statistic

__all__ = ["average_over_ranks"]


def average_over_ranks(params: Sequence[Parameter], comm: Communicator) -> None:
    """Make the running statistics among `params` their mean over ranks and devices.

    Collective, waits. Ranks count alike, whatever the number of their devices.

    Raises
    ------
    ValueError
        On all ranks, when they bring other statistics.
    """
    statistics = [param for param in params if is_statistic(param)]
    agree(comm, "running statistic", [[param.name, list(param.shape)] for param in statistics])
    if not statistics:
        return
    means = [device_mean(param.list_data()).asnumpy().ravel() for param in statistics]
    flat = np.concatenate(means).astype(np.float32, copy=False)
    if comm.size > 1:
        allreduce(flat, comm, op="mean", what="the mean of running statistics")
    ends = np.cumsum([mean.size for mean in means])
    for param, mean, end in zip(statistics, means, ends):
        value = mx.nd.array(flat[end - mean.size : end].reshape(param.shape))
        for data in map(classic, param.list_data()):
            data[:] = value.as_in_context(data.context).astype(data.dtype, copy=False)
