"""Memory of GPUs that the processes of a machine use together (CUDA IPC)."""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache
from typing import Any, Dict, List, Tuple

from .devices import address, device_of, load

__all__ = ["Imports", "allocation", "export"]

_Key = Tuple[int, str]


def export(array: Any) -> Dict[str, Any]:
    """Return what another process needs to use `array`, as JSON can say it.

    Raises
    ------
    RuntimeError, OSError
        On this rank: its memory cannot be given away (it comes from ``cudaMallocAsync``, the
        container forbids it, ...).
    """
    cuda = load().cuda
    with cuda.Device(device_of(array)):
        # Handles are those of whole allocations, and pools cut vectors out of them.
        start = allocation(address(array))
        handle = cuda.runtime.ipcGetMemHandle(start)
    return {"handle": bytes(handle).hex(), "offset": address(array) - start}


def allocation(pointer: int) -> int:
    """Return the start of the allocation in which `pointer` lies; CuPy does not tell."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = _driver().cuMemGetAddressRange_v2(
        ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(pointer)
    )
    if status != 0:
        raise RuntimeError(f"cuMemGetAddressRange: CUDA driver error {status}")
    return int(start.value)


@lru_cache(maxsize=None)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


# What this process has mapped, by device and handle: the address, and how many objects use it.
# One handle is mapped once, since not every CUDA counts how often.
_mapped: Dict[_Key, List[int]] = {}


class Imports:
    """Memory of other processes, mapped as long as this object lives."""

    def __init__(self) -> None:
        self._keys: List[_Key] = []
        self._close = weakref.finalize(self, _unmap, self._keys)
        self._close.atexit = False  # at the end of the process its mappings go by themselves

    def open(self, device: int, exported: Dict[str, Any]) -> int:
        """Return the address at which `device` finds an array of another process.

        Raises
        ------
        CUDARuntimeError
            On this rank: the device cannot reach it.
        """
        key = (device, str(exported["handle"]))
        if key not in self._keys:
            if key not in _mapped:
                cuda = load().cuda
                with cuda.Device(device):
                    _mapped[key] = [int(cuda.runtime.ipcOpenMemHandle(bytes.fromhex(key[1]))), 0]
            _mapped[key][1] += 1
            self._keys.append(key)
        return _mapped[key][0] + int(exported["offset"])

    def close(self) -> None:
        """Give everything up at once."""
        self._close()


def _unmap(keys: List[_Key]) -> None:
    cuda = load().cuda
    while keys:
        key = keys.pop()
        _mapped[key][1] -= 1
        if not _mapped[key][1]:
            with cuda.Device(key[0]):
                cuda.runtime.ipcCloseMemHandle(_mapped.pop(key)[0])
