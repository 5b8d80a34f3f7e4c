"""A bucket of gradients on GPUs: one vector on each device of this process.

In the engine each device's gradients are copied into its vector, the collective makes the mean
where the vectors lie, and it is copied back. No gradient lives here: each is copied in and out, by
a copy of its own.
"""

from __future__ import annotations

import logging
from typing import Any, Collection, List, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .bucket import ERRORS, SAMPLES, Layout, title
from .collectives import TAIL
from .collectives.devices import Queue, address, load, wait
from .communicator import Communicator
from .device_view import device_view

__all__ = ["DeviceBucket", "DevicePacking", "devices_of", "lay_on_devices"]

_log = logging.getLogger(__name__)


def _is_gpu(context: mx.Context) -> bool:
    return bool(context.device_type == "gpu")


def devices_of(params: Sequence[Parameter]) -> List[int]:
    """Return the GPUs on each of which all of `params` have a gradient; else an empty list."""
    contexts = params[0].list_ctx() if params else []
    alike = all(p.list_ctx() == contexts for p in params)
    return [c.device_id for c in contexts] if alike and all(map(_is_gpu, contexts)) else []


def lay_on_devices(
    params: Sequence[Parameter],
    layouts: Sequence[Layout],
    devices: Sequence[int],
    comm: Communicator,
) -> List[DeviceBucket]:
    """Make the buckets on GPUs where every rank can; collective.

    Parameters
    ----------
    params : sequence of Parameter
    layouts : sequence of Layout
    devices : sequence of int
        This rank's, from `devices_of`.
    comm : Communicator

    Returns
    -------
    list of DeviceBucket
        Empty on all ranks where one of them has gradients elsewhere, or no CuPy that works: if
        there are GPUs at all, rank 0 has logged why.
    """
    made: List[DeviceBucket] = []
    fault = None if devices else "its gradients do not all lie on GPUs"
    try:
        for number, layout in enumerate(layouts if devices else ()):
            made.append(DeviceBucket(number, params, layout, devices, comm))
    except ImportError as error:
        fault = f"{error}; install CuPy for its CUDA (docs/gpu.md)"
    except Exception as error:  # whatever is in the way, the CPU will do
        fault = f"{type(error).__name__}: {error}"
    everybody = comm.allgather([len(devices), fault], "the place of gradient buckets")
    faults = [f"rank {r}: {text}" for r, (_, text) in enumerate(everybody) if text is not None]
    if not faults:
        return made
    if comm.rank == 0 and any(count for count, _ in everybody):
        _log.warning(
            "gradients of GPUs are copied to the CPU and reduced there: %s", "; ".join(faults)
        )
    return []


class DeviceBucket:
    """Gradients that travel together, from GPU to GPU.

    Parameters
    ----------
    number : int
    params : sequence of Parameter
        All that the layout counts, of which the bucket has some; on `devices`, in this order.
    layout : Layout
    devices : sequence of int
    comm : Communicator
        Its limits bound each wait for copies.

    Attributes
    ----------
    arrays : list of NDArray
        What the collective of this bucket writes.
    vectors : list of cupy.ndarray, shape (layout.size,)
        One on each device.
    """

    def __init__(
        self,
        number: int,
        params: Sequence[Parameter],
        layout: Layout,
        devices: Sequence[int],
        comm: Communicator,
    ) -> None:
        self.number, self._comm = number, comm
        self._params = [params[index] for index in layout.indices]
        self._text = title(number, self._params)
        self._queues = [Queue(device) for device in devices]
        self.vectors: List[Any] = []
        for queue in self._queues:
            with queue.current():  # the zeros are there before the first copy
                self.vectors.append(load().zeros(layout.size, layout.dtype))
        spans = [
            slice(start, start + int(np.prod(param.shape)))
            for start, param in zip(layout.starts, self._params)
        ]
        self._places = [[vector[span] for span in spans] for vector in self.vectors]
        # Pinned, since a copy from other memory to the host waits inside CUDA.
        itemsize = np.dtype(layout.dtype).itemsize
        pinned = load().cuda.alloc_pinned_memory(3 * TAIL * itemsize)
        tails = np.frombuffer(pinned, layout.dtype, 3 * TAIL).reshape(3, TAIL)
        self._own, self._none, self._sum = tails
        self._none[:] = 0
        self._tail_at = (layout.size - TAIL) * itemsize
        self._handles: List[Any] = []
        self.settle()

    def __str__(self) -> str:
        return self._text

    def house(self) -> None:
        """Find gradients that are new, before backward writes them."""
        self.settle()

    def settle(self) -> None:
        """Find the gradients where backward has left them; waits where they were replaced."""
        handles = [array.handle for p in self._params for array in p._grad or p.list_grad()]
        if handles == self._handles:
            return
        by_param = [param.list_grad() for param in self._params]
        # Once, not in each step: a view waits for what is pending on its array.
        self._views = [[device_view(array) for array in device] for device in zip(*by_param)]
        self.arrays = [array for arrays in by_param for array in arrays]
        self._handles = handles

    def stage(self) -> None:
        """Do nothing: gradients are copied inside the engine."""

    def unstage(self) -> None:
        """Do nothing."""

    def packing(self, absent: Collection[str] = ()) -> DevicePacking:
        """Return what has to be copied as things are now; not inside the engine.

        Parameters
        ----------
        absent : collection of str
            Names of parameters that count as zeros.
        """
        sources = self._views
        if absent:
            gone = [param.name in absent for param in self._params]
            sources = [[0 if no else v for no, v in zip(gone, views)] for views in self._views]
        return DevicePacking(self, sources, self._views)

    def fill(self, sources: List[List[Any]]) -> None:
        """Start the copies of gradients (or zeros) into the vectors; `set_tail` waits for them."""
        self._copy(self._places, sources)

    def empty(self, targets: List[List[Any]]) -> None:
        """Copy what is in the vectors to gradients, and wait."""
        self._copy(targets, self._places)
        self._wait("the copies out of")

    def set_tail(self, weight: float, mark: float) -> None:
        """Write the sample count and the mark of this rank, and wait for all copies."""
        self._own[SAMPLES], self._own[ERRORS] = weight, mark
        tail = self._own  # of the first device alone: it counts for all of this rank's
        for queue, vector in zip(self._queues, self.vectors):
            queue.copy(address(vector) + self._tail_at, tail.ctypes.data, tail.nbytes)
            tail = self._none
        self._wait("the copies into")

    def errors(self) -> float:
        """Return the sum of all marks, 0 where all is well; after the collective."""
        source = address(self.vectors[0]) + self._tail_at
        self._queues[0].copy(self._sum.ctypes.data, source, self._sum.nbytes)
        self._wait("the tail of")
        return float(self._sum[ERRORS])

    def _copy(self, targets: List[List[Any]], sources: List[List[Any]]) -> None:
        for queue, into, out_of in zip(self._queues, targets, sources):
            with queue.current():
                for target, source in zip(into, out_of):
                    target[:] = source

    def _wait(self, doing: str) -> None:
        wait([queue.mark() for queue in self._queues], self._comm, f"{doing} {self}")


class DevicePacking(NamedTuple):
    """The copies into and out of a bucket in one step, for the engine.

    Gradients that were replaced since are copied where they were.
    """

    bucket: DeviceBucket
    sources: List[List[Any]]
    views: List[List[Any]]

    def pack(self) -> None:
        """Start copying gradients, by device, to their places."""
        self.bucket.fill(self.sources)

    def unpack(self) -> None:
        """Copy the means back, and wait."""
        self.bucket.empty(self.views)
