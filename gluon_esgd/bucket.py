"""A bucket of gradients: one flat buffer in which the gradients themselves live where they can.

What lives in the buffer is neither packed nor unpacked: backward writes there, and the collective
finds it there. What cannot (a gradient of another type, on a GPU, of a second device, or one
that backward has written before) is copied into its slot and back.
"""

from __future__ import annotations

from typing import Any, Collection, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .collectives import pack_order
from .engine import exchange, move, view

__all__ = ["ERRORS", "SAMPLES", "TAIL", "Bucket", "Layout", "lay"]

TAIL = 2  # elements behind the gradients: the rank's sample count, and its error mark
SAMPLES, ERRORS = -2, -1

_ALIGNED_BYTES = 64  # a cache line, so that no two gradients share one
_NAMED = 3  # parameters that an error message names
_UNTOUCHED = -7.0e-31  # left where a gradient has moved away: who writes there still?


class Layout(NamedTuple):
    """Where gradients lie in a bucket: `starts` of the parameters `indices`, in elements.

    `size` is the bucket's length with its tail.
    """

    indices: List[int]
    starts: List[int]
    dtype: str
    size: int


def lay(params: Sequence[Parameter], bucket_bytes: int) -> List[Layout]:
    """Lay the gradients of initialized `params` into buckets, in the order of travel."""
    sizes = [int(np.prod(p.shape)) for p in params]
    dtypes = [np.dtype(p.dtype).name for p in params]
    layouts = []
    for indices, dtype in pack_order(sizes, dtypes, bucket_bytes):
        step = _ALIGNED_BYTES // np.dtype(dtype).itemsize
        ends = np.cumsum([-(-sizes[i] // step) * step for i in indices]).tolist()
        layouts.append(Layout(indices, [0, *ends[:-1]], dtype, ends[-1] + TAIL))
    return layouts


class _Slot:
    """The place of one parameter's gradient in a bucket, and what has to be copied there."""

    def __init__(self, param: Parameter, memory: np.ndarray) -> None:
        self.param, self.memory = param, memory
        self.lives_here = False  # the gradient of the first device
        self.packed: List[mx.nd.NDArray] = []  # on the CPU, copied in the engine
        self.staged: List[Tuple[mx.nd.NDArray, mx.nd.NDArray]] = []  # elsewhere, and packed
        self.former: Optional[mx.nd.NDArray] = None  # where the gradient lived before
        self._arrays: List[mx.nd.NDArray] = []
        self._handles: List[Any] = []

    @property
    def settled(self) -> bool:
        """Whether the gradient's arrays are those of the step before (no cast, reset_ctx, ...)."""
        arrays = self.param._grad
        return arrays is self._arrays and all(
            array.handle is handle for array, handle in zip(arrays, self._handles)
        )

    def settle(self, may_move: bool = False) -> None:
        """See what has to be copied; let the first array live here if it may and can."""
        arrays, self.former = self.param.list_grad(), None
        self.lives_here = may_move and self._can_live_here(arrays)
        if self.lives_here:
            self.former = move(arrays[0], self.memory)
            self.former[:] = _UNTOUCHED
            self._mark()
        self._look(arrays)

    def _look(self, arrays: List[mx.nd.NDArray]) -> None:
        self.packed, self.staged = [], []
        for array in arrays[self.lives_here :]:
            array.wait_to_read()  # new ones have no memory before
            copy = array
            if array.context.device_type != "cpu":
                copy = mx.nd.empty(array.shape, mx.cpu(), array.dtype)  # allocated at once
                self.staged.append((array, copy))
            self.packed.append(copy)
        self._arrays = self.param._grad
        self._handles = [array.handle for array in arrays]

    def _can_live_here(self, arrays: List[mx.nd.NDArray]) -> bool:
        """Backward has not written it yet, and can write it here."""
        first = arrays[0]
        return bool(
            self.param.grad_req == "write"
            and first.context == mx.cpu(0)
            and first.dtype == self.memory.dtype
            and not any(data._fresh_grad for data in self.param.list_data())
            and not first.asnumpy().any()
        )

    def _mark(self) -> None:
        """Tell autograd where the gradients are now."""
        data = self.param.list_data()
        fresh = [array._fresh_grad for array in data]
        mx.autograd.mark_variables(data, self.param.list_grad(), [self.param.grad_req] * len(data))
        for array, was_fresh in zip(data, fresh):
            array._fresh_grad = bool(was_fresh)

    def verify(self) -> bool:
        """See, after a backward pass, that it has written here; waits for it.

        A hybridized network with static_shape that ran backward before goes on writing where it
        wrote then, whatever autograd is told. There the gradient moves back and is packed.

        Returns
        -------
        bool
            Whether anything had to be changed.
        """
        former = self.former
        if former is None or not all(data._fresh_grad for data in self.param.list_data()):
            return False
        self.former = None
        if (former.asnumpy() == former.dtype(_UNTOUCHED)).all():
            return False
        self.lives_here = False
        exchange(self.param.list_grad()[0], former)
        self._mark()
        self._look(self.param.list_grad())
        return True


class Bucket:
    """Gradients that travel together.

    Parameters
    ----------
    number : int
    params : sequence of Parameter
        All that the layout counts, of which the bucket has some; initialized.
    layout : Layout
    buffer : ndarray, shape (layout.size,)
        Zeros; best in memory that the ranks of the machine share. Gradients that backward has not
        written yet move there.
    """

    def __init__(
        self, number: int, params: Sequence[Parameter], layout: Layout, buffer: np.ndarray
    ) -> None:
        self.number, self.buffer = number, buffer
        self._slots = []
        for index, start in zip(layout.indices, layout.starts):
            end = start + int(np.prod(params[index].shape))
            self._slots.append(_Slot(params[index], buffer[start:end]))
        names = [p.name for p in (slot.param for slot in self._slots)]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        self._text = f"gradient bucket {number} ({', '.join(names[:_NAMED])}{more})"
        self.house()

    def __str__(self) -> str:
        return self._text

    def house(self) -> None:
        """Let gradients that are new live here, before backward writes them."""
        for slot in self._slots:
            if not slot.settled:
                slot.settle(may_move=True)
        self._list()

    def settle(self) -> None:
        """Find the gradients where backward has left them; they may have been replaced since."""
        changed = False
        for slot in self._slots:
            if not slot.settled:
                slot.settle()
                changed = True
            elif slot.former is not None:
                changed |= slot.verify()
        if changed:
            self._list()

    def _list(self) -> None:
        at_home = [slot.param.list_grad()[0] for slot in self._slots if slot.lives_here]
        #: What the collective of this bucket writes.
        self.arrays = [*at_home, *(array for slot in self._slots for array in slot.packed)]
        self._staged = [pair for slot in self._slots for pair in slot.staged]

    def stage(self) -> None:
        """Push copies of what is not on the CPU to beside it."""
        for array, copy in self._staged:
            array.copyto(copy)

    def unstage(self) -> None:
        """Push the copies back."""
        for array, copy in self._staged:
            copy.copyto(array)

    def views(self) -> List[List[np.ndarray]]:
        """Return the memory of what has to be packed, by parameter; not inside the engine."""
        return [[view(array) for array in slot.packed] for slot in self._slots]

    def pack(self, views: List[List[np.ndarray]], absent: Collection[str]) -> None:
        """Put the sums over this process's devices into the buffer; zeros for `absent` ones."""
        for slot, arrays in zip(self._slots, views):
            if slot.param.name in absent:
                slot.memory[:] = 0
                continue
            if not slot.lives_here:
                slot.memory[:] = arrays[0]
            for other in arrays if slot.lives_here else arrays[1:]:
                np.add(slot.memory, other, out=slot.memory)

    def unpack(self, views: List[List[np.ndarray]]) -> None:
        """Write what is in the buffer to the devices whose gradients do not live there."""
        for slot, arrays in zip(self._slots, views):
            for out in arrays:
                out[:] = slot.memory
