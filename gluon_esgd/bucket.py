"""A bucket of gradients: one flat buffer in which the gradients themselves live where they can.

What lives in the buffer is neither packed nor unpacked: backward writes there, and the collective
finds it there. What cannot (a gradient of another type, on a GPU, of a second device, or
where a graph goes on writing elsewhere) is copied into its slot and back. Where all ranks can,
gradients on GPUs have buckets of their own (`device_bucket`).
"""

from __future__ import annotations

import weakref
from typing import Any, Collection, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .collectives import TAIL, pack_order
from .engine import move, swap, view

__all__ = ["ERRORS", "SAMPLES", "Bucket", "Layout", "Packing", "lay", "title"]

SAMPLES, ERRORS = -TAIL, -1  # behind the gradients: the rank's sample count, and its mark

_ALIGNED_BYTES = 64  # a cache line, so that no two gradients share one
# Attribute of a parameter: a reference to the bucket in which its gradient lives.
_HOME = "_gluon_esgd_home"
_MARK = -(2.0**-100)  # left where a gradient has moved away: who writes there still?
_LOOKED_AT = 16  # elements of it


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


def title(number: int, params: Sequence[Parameter]) -> str:
    """Return how messages call bucket `number`, of the gradients of `params`."""
    names = [p.name for p in params]
    which = f"{names[0]} to {names[-1]}, {len(names)} parameters"
    return f"gradient bucket {number} ({names[0] if len(names) == 1 else which})"


class _Slot:
    """The place of one parameter's gradient in a bucket, and what has to be copied there."""

    def __init__(self, param: Parameter, memory: np.ndarray) -> None:
        self.param, self.memory = param, memory
        self.lives_here = False  # the gradient of the first device
        self.packed: List[mx.nd.NDArray] = []  # on the CPU, copied in the engine
        self.staged: List[Tuple[mx.nd.NDArray, mx.nd.NDArray]] = []  # elsewhere, and packed
        self.former: Optional[mx.nd.NDArray] = None  # where the gradient lived until now
        self._marked = False
        self._arrays: List[mx.nd.NDArray] = []
        self._handles: List[Any] = []

    @property
    def settled(self) -> bool:
        """Whether the gradient's arrays are those of the step before (no cast, reset_ctx, ...)."""
        arrays = self.param._grad
        if arrays is not self._arrays:
            return False
        for array, handle in zip(arrays, self._handles):  # noqa: SIM110 (asked often)
            if array.handle is not handle:
                return False
        return True

    def settle(self) -> None:
        """Take the arrays that there are now; all of them are packed."""
        self.lives_here, self.former = False, None
        self._look()

    def _look(self) -> None:
        arrays = self.param.list_grad()
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

    def house(self, bucket: Bucket) -> None:
        """Let the first array live here, before the first backward pass, if it can."""
        if not self._can_live_here(bucket):
            return
        self.memory[:] = 0
        self.former = move(self.param.list_grad()[0], self.memory)
        self._marked = False
        self._mark()
        self.lives_here = True
        setattr(self.param, _HOME, weakref.ref(bucket))
        self._look()

    def _can_live_here(self, bucket: Bucket) -> bool:
        """Whether backward can write it here, and no graph is used to writing it elsewhere."""
        first = self.param.list_grad()[0]
        return bool(
            self.param.grad_req == "write"
            and first.context == mx.cpu(0)
            and first.dtype == self.memory.dtype
            and getattr(self.param, _HOME, _nobody)() in (None, bucket)
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

    def verify(self) -> None:
        """See, after the first backward pass since it moved, that the gradient comes here; waits.

        A graph that was recorded before, and a network hybridized with static_shape that has run
        backward before, go on writing where they wrote then, whatever autograd is told. Then the
        gradient moves back, and is packed.
        """
        fresh = all(array._fresh_grad for array in self.param.list_data())
        if fresh and self._comes_here():
            self.former = None
        elif self._goes_elsewhere():
            self._move_back()
        elif not self._marked:
            # Zeros, or nothing yet. From now on other ranks write here too: a mark tells.
            assert self.former is not None
            self.former[:] = _MARK
            self._marked = True

    def _comes_here(self) -> bool:
        if self._marked:
            return not self._goes_elsewhere()
        self.param.list_grad()[0].wait_to_read()
        return bool(self.memory.any())  # it was zeros

    def _goes_elsewhere(self) -> bool:
        assert self.former is not None
        if self._marked:
            return bool((self.former.reshape(-1)[:_LOOKED_AT].asnumpy() != _MARK).any())
        return bool(self.former.asnumpy().any())

    def _move_back(self) -> None:
        former, self.former, self.lives_here = self.former, None, False
        swap(self.param.list_grad()[0], former)
        self._mark()
        for array in self.param.list_data():
            array._fresh_grad = True
        setattr(self.param, _HOME, _nobody)
        self._look()


def _nobody() -> None:
    return None


class Bucket:
    """Gradients that travel together.

    Parameters
    ----------
    number : int
    params : sequence of Parameter
        All that the layout counts, of which the bucket has some; initialized.
    layout : Layout
    buffer : ndarray, shape (layout.size,)
        Zeros; best in memory that the ranks of the machine share.
    """

    def __init__(
        self, number: int, params: Sequence[Parameter], layout: Layout, buffer: np.ndarray
    ) -> None:
        self.number, self.buffer = number, buffer
        self._slots = []
        for index, start in zip(layout.indices, layout.starts):
            end = start + int(np.prod(params[index].shape))
            self._slots.append(_Slot(params[index], buffer[start:end]))
        self._text = title(number, [slot.param for slot in self._slots])
        self.house()

    def __str__(self) -> str:
        return self._text

    @property
    def vectors(self) -> List[np.ndarray]:
        """What takes part in the collective: the buffer."""
        return [self.buffer]

    def set_tail(self, weight: float, mark: float) -> None:
        """Write the sample count and the mark of this rank."""
        self.buffer[SAMPLES], self.buffer[ERRORS] = weight, mark

    def errors(self) -> float:
        """Return the sum of all marks, 0 where all is well; after the collective."""
        return float(self.buffer[ERRORS])

    def house(self) -> None:
        """Let new gradients live here, before backward writes them; waits where there are some.

        Whoever holds a gradient sees its values as before.
        """
        new = [slot for slot in self._slots if not slot.settled]
        if new:
            mx.nd.waitall()  # for the engine an array that moves here has nothing to do with others
        for slot in new:
            slot.settle()
            slot.house(self)
        self._list()

    def settle(self) -> None:
        """Find the gradients where backward has left them; they may have been replaced since."""
        changed = False
        for slot in self._slots:
            if not slot.settled:
                slot.settle()
                changed = True
            elif slot.former is not None:
                slot.verify()
                changed = True
        if changed:
            self._list()

    def _list(self) -> None:
        at_home = [slot.param.list_grad()[0] for slot in self._slots if slot.lives_here]
        #: What the collective of this bucket writes.
        self.arrays = [*at_home, *(array for slot in self._slots for array in slot.packed)]
        self._packed = [slot for slot in self._slots if slot.packed]
        self._staged = [pair for slot in self._slots for pair in slot.staged]

    def stage(self) -> None:
        """Push copies of what is not on the CPU to beside it."""
        for array, copy in self._staged:
            array.copyto(copy)

    def unstage(self) -> None:
        """Push the copies back."""
        for array, copy in self._staged:
            copy.copyto(array)

    def packing(self, absent: Collection[str] = ()) -> Packing:
        """Return what has to be copied as things are now; not inside the engine.

        Parameters
        ----------
        absent : collection of str
            Names of parameters that count as zeros.
        """
        zeros = []
        if absent:
            zeros = [slot.memory for slot in self._slots if slot.param.name in absent]
        pieces = [
            _Piece(slot.memory, slot.lives_here, [view(array) for array in slot.packed])
            for slot in self._packed
        ]
        return Packing(zeros, pieces)


class _Piece(NamedTuple):
    """The place of a gradient in the buffer, whether one lives there, and those that do not."""

    memory: np.ndarray
    lives_here: bool
    views: List[np.ndarray]


class Packing(NamedTuple):
    """The copies into and out of a bucket in one step, for the engine."""

    zeros: List[np.ndarray]
    pieces: List[_Piece]

    def pack(self) -> None:
        """Add up what lies outside of the buffer in it, over this process's devices."""
        for memory, lives_here, views in self.pieces:
            if not lives_here:
                memory[:] = views[0]
            for other in views if lives_here else views[1:]:
                np.add(memory, other, out=memory)
        for memory in self.zeros:
            memory[:] = 0

    def unpack(self) -> None:
        """Write what is in the buffer to the devices whose gradients do not live there."""
        for memory, _, views in self.pieces:
            for out in views:
                out[:] = memory
