"""Arrays on GPUs: where they lie, which device reaches which, and streams.

Nothing else in the package synchronizes a stream. No wait blocks inside CUDA: events are asked
again and again, so that a wait has the limits of every other one and names who is missing.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, List, Optional, Sequence

from ..communicator import Communicator
from ..errors import CollectiveError

__all__ = [
    "Queue",
    "address",
    "device_of",
    "has_nccl",
    "is_on_device",
    "load",
    "pin",
    "reach",
    "ready",
    "wait",
]

_SUCCESS, _NOT_READY, _ALREADY_ENABLED = 0, 600, 704  # of cudaError_t
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


def load() -> Any:
    """Return the module ``cupy``; it is loaded when the first vector on a GPU comes."""
    import cupy

    return cupy


def is_on_device(array: Any) -> bool:
    """Whether `array` lies on a GPU (a CuPy array, say)."""
    return hasattr(array, "__cuda_array_interface__")


def device_of(array: Any) -> int:
    """Return the number of the device on which `array` lies."""
    return int(array.device.id)


def address(array: Any) -> int:
    """Return where the elements of `array` lie in its device's memory."""
    return int(array.data.ptr)


def has_nccl() -> bool:
    """Whether this CuPy finds NCCL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy 14 warns where it does not
        from cupy.cuda import nccl

        return bool(nccl.available)


class Queue:
    """A stream on one device, of which nobody else knows.

    Parameters
    ----------
    device : int
    """

    def __init__(self, device: int) -> None:
        self.device, self._cuda = device, load().cuda
        with self._cuda.Device(device):
            self._stream = self._cuda.Stream(non_blocking=True)

    @property
    def pointer(self) -> int:
        """The ``cudaStream_t``."""
        return int(self._stream.ptr)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let what the block starts run in this queue."""
        with self._cuda.Device(self.device), self._stream:
            yield

    def after(self, events: Iterable[Any]) -> None:
        """Let what comes next wait, on the device, for `events` of any device."""
        for event in events:
            self._stream.wait_event(event)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between two addresses, each in host memory or on any device."""
        runtime = self._cuda.runtime
        with self.current():
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, self.pointer)

    def mark(self) -> Any:
        """Return an event that is over when everything started so far is."""
        with self.current():
            return _event(self._cuda)


def _event(cuda: Any) -> Any:
    """An event on the current stream of the current device."""
    event = cuda.Event(block=False, disable_timing=True)
    event.record()
    return event


def ready(vectors: Sequence[Any]) -> List[Any]:
    """Return events for what the caller's own streams still do, on the devices of `vectors`."""
    cuda, events = load().cuda, []
    for device in sorted({device_of(v) for v in vectors}):
        with cuda.Device(device):
            events.append(_event(cuda))
    return events


def wait(events: Sequence[Any], comm: Communicator, what: str) -> None:
    """Wait for `events` of the collective `what`, within the limits of `comm`.

    Raises
    ------
    CollectiveError
        On this rank: a device reports an error.
    """
    pending = list(events)
    query = load().cuda.runtime.eventQuery

    def done() -> bool:
        while pending:
            status = query(pending[-1].ptr)
            if status == _NOT_READY:
                return False
            if status != _SUCCESS:
                raise CollectiveError(f"{comm.called}: {what} failed: CUDA error {status}")
            pending.pop()
        return True

    comm.wait_for(done, what)


def reach(device: int, others: Iterable[int]) -> Optional[str]:
    """Let `device` use the memory of `others`; return what is in the way, if anything."""
    cuda = load().cuda
    for other in sorted(set(others) - {device}):
        if not cuda.runtime.deviceCanAccessPeer(device, other):
            return f"GPU {device} cannot access GPU {other}"
        with cuda.Device(device):
            try:
                cuda.runtime.deviceEnablePeerAccess(other)
            except cuda.runtime.CUDARuntimeError as error:
                if error.status != _ALREADY_ENABLED:
                    return f"GPU {device} cannot access GPU {other}: {error}"
    return None


def pin(pointer: int, nbytes: int) -> Optional[str]:
    """Pin host memory, so that copies run beside everything else; return what went wrong."""
    runtime = load().cuda.runtime
    try:
        runtime.hostRegister(pointer, nbytes, _PORTABLE)
    except runtime.CUDARuntimeError as error:
        return str(error)
    return None
