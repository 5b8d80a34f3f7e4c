"""The door into MXNet's engine: Python functions as operations of its graph.

An operation names the arrays that it reads and writes; the engine starts it
when they are ready and lets nothing else touch them meanwhile. Pushing returns
at once.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from typing import Any, Callable, Dict, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, NDArrayHandle, check_call

__all__ = ["Lane", "lane", "lay_plain", "move", "swap", "view", "wait_to_write"]

_CPU = 1
_PRIORITIZED = 3  # a thread pool of its own, so that compute threads are not blocked

_CTYPES = {
    np.dtype("float16"): ctypes.c_uint16,
    np.dtype("float32"): ctypes.c_float,
    np.dtype("float64"): ctypes.c_double,
}


class _Context(ctypes.Structure):
    _fields_ = (("dev_type", ctypes.c_int), ("dev_id", ctypes.c_int))


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_operations: Dict[int, Callable[[], None]] = {}
_next_number = 1


def _run_operation(_: int, number: int) -> None:
    _operations.pop(number)()


_callback = _Callback(
    _run_operation
)  # one for all operations, and for ever: the engine may call late


@mx.nd.ndarray.DeleterFunc
def _let_go(
    tensor: Any,
    cast: Callable = ctypes.cast,
    kind: type = ctypes.py_object,
    decrement: Callable = ctypes.pythonapi.Py_DecRef,
) -> None:
    decrement(cast(tensor.contents.manager_ctx, kind))


# MXNet's own looks up names that are gone at the interpreter's end; the process then dies of
# SIGSEGV where an array that `from_numpy` made without a copy lives so long. So does one that is
# freed itself by then: this one never is.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_let_go))
mx.nd.ndarray.dl_managed_tensor_deleter = _let_go


def _handles(arrays: Sequence[mx.nd.NDArray]) -> ctypes.Array:
    return (NDArrayHandle * max(1, len(arrays)))(*[a.handle for a in arrays])


def _push(
    operation: Callable[[], None],
    reads: Sequence[mx.nd.NDArray],
    writes: Sequence[mx.nd.NDArray],
    name: str,
) -> None:
    global _next_number
    number, _next_number = _next_number, _next_number + 1
    _operations[number] = operation
    check_call(
        _LIB.MXEnginePushSyncND(
            _callback,
            ctypes.c_void_p(number),
            None,
            ctypes.byref(_Context(_CPU, 0)),
            _handles(reads),
            len(reads),
            _handles(writes),
            len(writes),
            ctypes.byref(ctypes.c_int(_PRIORITIZED)),
            0,
            name.encode(),
        )
    )


def view(array: mx.nd.NDArray) -> np.ndarray:
    """Return the memory of a dense CPU `array` as a flat numpy array, without a copy.

    It waits for nothing that is pending on the array, but the memory has to be there: MXNet
    allocates what an operator returns when the operator runs, so wait once for a new array.
    Look a view up on the thread that pushes, never inside an operation that uses the array: for a
    weight in a blocked oneDNN layout the lookup is itself an operation on it.
    """
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    dtype = np.dtype(array.dtype)
    if not array.size:
        return np.empty(0, dtype)
    memory = (_CTYPES[dtype] * array.size).from_address(pointer.value or 0)
    memory.owner = array  # the view keeps the array alive
    return np.frombuffer(memory, dtype)


def lay_plain(array: mx.nd.NDArray) -> None:
    """Put `array` back into the plain layout where oneDNN has laid it out anew; else free of cost.

    Where it has, this waits for what is pending on the array.
    """
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(ctypes.c_void_p())))


def swap(one: mx.nd.NDArray, other: mx.nd.NDArray) -> None:
    """Let two arrays of one shape and type change their memory; the objects stay who they are."""
    one.handle, other.handle = other.handle, one.handle


def move(array: mx.nd.NDArray, memory: np.ndarray) -> mx.nd.NDArray:
    """Let a CPU `array` live in `memory` from now on, with its values; does not wait.

    The object stays the same, so whoever holds it goes on seeing its values; what was derived from
    it before (slices, other shapes) and autograd's marks know only the old memory.

    Parameters
    ----------
    array : NDArray
    memory : ndarray
        Contiguous, of the array's type and size; kept alive as long as `array` lives there.

    Returns
    -------
    NDArray
        What has the old memory now.
    """
    # from_numpy makes what it is given read-only: a view of its own.
    there = mx.nd.from_numpy(memory.reshape(array.shape).view(), zero_copy=True)
    array.as_nd_ndarray().copyto(there)
    swap(array, there)
    return there


def wait_to_write(array: mx.nd.NDArray) -> None:
    """Return when nothing in the engine reads or writes `array` any more."""
    check_call(_LIB.MXNDArrayWaitToWrite(array.handle))


def _crash_at_once() -> None:
    """Let a crash end the process, with a Python traceback.

    MXNet's handler calls ``exit``, which waits for the engine, which waits for
    the interpreter's lock that the crashed thread may hold.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGILL):
        if signal.getsignal(number) in (None, signal.SIG_DFL):  # not the script's own
            signal.signal(number, signal.SIG_DFL)
    if sys.stderr is not None and not faulthandler.is_enabled():
        faulthandler.enable(2)


class Lane:
    """Operations of one process that run one after the other, in the order of pushing.

    Every collective of the process goes through the one lane, in the same order
    on all ranks, so that no two ranks wait for each other. The first failure
    closes the lane: what was pushed after it does nothing, and `check` raises it.
    """

    def __init__(self) -> None:
        self._token = mx.nd.zeros((1,))
        self._failure: Optional[BaseException] = None
        self.raised = False  # whether the script has been told of the failure
        self._pushed = self._done = 0
        self._owner = os.getpid()
        self._inside = threading.local()
        _crash_at_once()
        os.register_at_fork(before=self._before_fork)
        if sys.version_info < (3, 10):
            # There subprocess forks without the hooks of os.register_at_fork.
            sys.addaudithook(lambda event, _: self._before_popen(event))
        atexit.register(self.drain)

    def push(
        self,
        function: Callable[[], None],
        name: str,
        reads: Sequence[mx.nd.NDArray] = (),
        writes: Sequence[mx.nd.NDArray] = (),
    ) -> None:
        """Run `function` in the engine when the arrays are ready and its turn has come.

        Parameters
        ----------
        function : callable
            It may block; an exception in it closes the lane.
        name : str
            Shown by MXNet's profiler.
        reads, writes : sequences of NDArray
            What it touches, through views that were looked up before. No array
            may be in both.

        Raises
        ------
        RuntimeError
            In a forked child: the engine and MPI belong to the parent.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"{name} in a forked child: train in the process that made the trainer"
            )
        self._pushed += 1
        _push(lambda: self._run(function), reads, [*writes, self._token], name)

    def _run(self, function: Callable[[], None]) -> None:
        self._inside.yes = True
        try:
            if self._failure is None:
                function()
        except BaseException as error:  # cannot cross the C callback
            self._failure = error
        finally:
            self._done += 1
            self._inside.yes = False

    @property
    def failed(self) -> bool:
        """Whether an operation has failed and closed the lane."""
        return self._failure is not None

    @property
    def idle(self) -> bool:
        """Whether everything pushed has run."""
        return self._pushed == self._done

    def check(self) -> None:
        """Raise the failure that closed the lane, if there was one; does not wait."""
        if self._failure is not None:
            self.raised = True
            raise self._failure

    def wait(self) -> None:
        """Wait for everything pushed so far, then `check`."""
        self._token.wait_to_read()
        self.check()

    def drain(self) -> None:
        """Wait for everything that the engine has to do, whoever pushed it."""
        if os.getpid() == self._owner and not getattr(self._inside, "yes", False):
            mx.nd.waitall()

    def _before_fork(self) -> None:
        # MXNet's own fork handler waits for the engine while it holds the
        # interpreter lock that a pending operation of ours needs.
        self.drain()

    def _before_popen(self, event: str) -> None:
        if event == "subprocess.Popen":
            self.drain()


_lane: Optional[Lane] = None


def lane() -> Lane:
    """Return the lane of this process."""
    global _lane
    if _lane is None:
        _lane = Lane()
    return _lane
