"""CPU devices that stand for GPUs: `DeviceBucket` over the CuPy of numpy.

``mx.cpu(k)`` is GPU `k`. Gradients are CPU arrays, which CuPy's part sees as vectors on that GPU.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import Any, Iterator
from unittest import mock

import mxnet as mx
import numpy as np

from gluon_esgd import device_bucket
from gluon_esgd.collectives import nccl
from gluon_esgd.communicator import Communicator
from gluon_esgd.engine import view

from ..collectives import fake_cupy

__all__ = ["Vector", "fake_gpus"]


class Vector:
    """A flat array on a device; it is cut at once, and written when its stream comes to that."""

    def __init__(self, host: np.ndarray, device: int) -> None:
        self.host, self.device = host, fake_cupy.Device(device)
        self.data = fake_cupy.Pointer(host.ctypes.data)
        for name in ("dtype", "size", "shape", "strides", "ndim", "nbytes", "itemsize", "flags"):
            setattr(self, name, getattr(host, name))
        self.__cuda_array_interface__: dict = {}

    def __getitem__(self, span: slice) -> Vector:
        return Vector(self.host[span], self.device.id)

    def __setitem__(self, span: slice, value: Any) -> None:
        target, source, here = self.host[span], value, fake_cupy.machine.device[-1]
        assert self.device.id == here, "a kernel writes to the memory of another device"
        if isinstance(value, Vector):
            assert value.device.id == here, "a kernel reads the memory of another device"
            source = value.host
            if source.shape != target.shape:
                raise ValueError(f"cannot copy {source.shape} to {target.shape}")
        fake_cupy.machine.copies += 1

        def work() -> bool:
            target[:] = source
            return True

        fake_cupy.get_current_stream().start(work)


def _zeros(size: int, dtype: Any) -> Vector:
    # Not numbers until the stream comes to the zeros.
    device = fake_cupy.machine.device[-1]
    made = Vector(fake_cupy.Array(np.full(size, np.nan, dtype), device).host, device)
    made[:] = 0
    return made


def _view(array: mx.nd.NDArray) -> Vector:
    array.wait_to_read()
    return Vector(view(array), array.context.device_id)


@contextmanager
def fake_gpus(comm: Communicator, cupy: bool = True, **kinds: Any) -> Iterator[fake_cupy.Machine]:
    """Let CPU devices be GPUs in the block, without CuPy if so wanted; collective."""
    nccl._made.clear()
    with fake_cupy.installed(number=comm.rank, **kinds) as machine, mock.patch.multiple(
        device_bucket, _is_gpu=lambda context: True, device_view=_view
    ):
        sys.modules["cupy"].zeros = _zeros  # type: ignore[attr-defined]
        if not cupy:
            sys.modules["cupy"] = None  # type: ignore[assignment]
        yield machine
        mx.nd.waitall()
        gc.collect()
        assert not machine.pinned and not machine.imported, "plans leave memory mapped or pinned"
        comm.barrier("the end of a test")  # others may still read this rank's memory
