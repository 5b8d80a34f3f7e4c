"""The kernels of ``kernels.cu``, as CuPy compiles and starts them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np

from .devices import Queue, load
from .operations import Operation, accumulator

__all__ = ["MOST", "Launch", "keeping", "narrowing", "reducing", "widening"]

MOST = 16  # vectors in one launch, as in kernels.cu

_BLOCK = 256
_BLOCKS_PER_PROCESSOR = 8  # at most; threads of a long vector then take several packs each

# By value, laid out as the structs of kernels.cu.
_VECTORS = np.dtype([("at", np.uint64, (MOST,))])
_DIVISOR = np.dtype(
    [("divides", np.int32), ("value", np.float64), ("weight", np.uint64)], align=True
)


def reducing(dtype: Any, op: Operation) -> str:
    """Return the kernel that combines vectors of `dtype`; means add up."""
    return f"{np.dtype(dtype).name}_{op.name if op.name in ('min', 'max') else 'sum'}"


def widening(dtype: Any, op: Operation) -> str:
    """Return the same with a result in the type in which `dtype` is added up."""
    if accumulator(dtype) == dtype:
        return reducing(dtype, op)
    return reducing(dtype, op).replace("float16", "float16_to_float32")


def narrowing(dtype: Any) -> str:
    """Return the kernel that takes sums back to `dtype`."""
    same = accumulator(dtype) == dtype
    return f"{np.dtype(dtype).name}_sum" if same else "float32_to_float16_sum"


def keeping(itemsize: int) -> str:
    """Return the kernel that copies elements of `itemsize` bytes."""
    return f"keep_{itemsize}"


class Launch:
    """A kernel with its arguments, started as often as it is called.

    Parameters
    ----------
    kernel : str
        One of those that the functions of this module name.
    sources, targets : sequence of int
        Addresses that the device of `queue` can use, at most `MOST`; a target may be a source.
    length : int
        Elements.
    queue : Queue
        Where it runs.
    divisor : float, optional
        What to divide the result by.
    weight : int, optional
        In its place: the address of it, in the type of the sums; read when the kernel runs.
    """

    def __init__(
        self,
        kernel: str,
        sources: Sequence[int],
        targets: Sequence[int],
        length: int,
        queue: Queue,
        *,
        divisor: Optional[float] = None,
        weight: Optional[int] = None,
    ) -> None:
        self._kernel, self._queue, self._length = kernel, queue, length
        divides = divisor is not None or weight is not None
        by = np.array([(divides, divisor or 0.0, weight or 0)], _DIVISOR)
        self._arguments = (
            _pointers(sources),
            np.int32(len(sources)),
            _pointers(targets),
            np.int32(len(targets)),
            np.int64(length),
            by,
        )

    def __call__(self) -> None:
        """Start it; returns at once."""
        if self._length:
            with self._queue.current():
                blocks = min(-(-self._length // _BLOCK), _most_blocks(self._queue.device))
                _function(self._kernel)((blocks,), (_BLOCK,), self._arguments)


def _pointers(addresses: Sequence[int]) -> np.ndarray:
    packed = np.zeros(1, _VECTORS)
    packed["at"][0, : len(addresses)] = addresses
    return packed


@lru_cache(maxsize=None)
def _module() -> Any:
    source = Path(__file__).with_name("kernels.cu").read_text()
    return load().RawModule(code=source, options=("--std=c++14",))


@lru_cache(maxsize=None)
def _function(kernel: str) -> Any:
    return _module().get_function(kernel)


@lru_cache(maxsize=None)
def _most_blocks(device: int) -> int:
    attributes = load().cuda.Device(device).attributes
    return int(attributes["MultiProcessorCount"]) * _BLOCKS_PER_PROCESSOR
