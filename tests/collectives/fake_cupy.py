"""As much of CuPy as the collectives use, on numpy: devices, streams and memory that are checked.

Nothing runs when it is started. Under ``late`` it runs when an event that comes behind it is asked
for, and not at all otherwise, so that a wait too few leaves wrong numbers; under ``early`` it runs
as soon as what it waits for is over; under ``mixed`` now and then. An address that the device
cannot use, a stream of another device, a handle opened twice are errors, as on a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import shutil
import sys
import tempfile
import types
from contextlib import contextmanager
from mmap import mmap
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import numpy as np

from gluon_esgd.collectives import ipc, kernels

from . import kernel_library

ORDERS = ("late", "early", "mixed")
_DEVICES = 4


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, said: str = "") -> None:
        super().__init__(f"CUDA error {status} {said}")
        self.status = status


class Machine:
    """What the driver of this process knows.

    Parameters
    ----------
    order : str
        One of `ORDERS`.
    number : int
        Of the process, for the bus ids of its devices.
    apart : bool
        Whether devices cannot access each other.
    private : bool
        Whether memory cannot be given to other processes.
    shared : bool
        Whether all processes have the same devices.
    version : str
        CuPy's.
    """

    def __init__(
        self,
        order: str = "late",
        number: int = 0,
        apart: bool = False,
        private: bool = False,
        shared: bool = False,
        version: str = "12.3.0",
    ) -> None:
        self.version = version
        self.order, self.apart, self.private = order, apart, private
        self.first = 0 if shared else number * _DEVICES
        self.folder = tempfile.mkdtemp(prefix="fake-gpu-")
        self.random = random.Random(number)
        self.numbers = itertools.count(1000)
        self.device: List[int] = [0]
        self.current: Dict[int, List[Stream]] = {}
        self.streams: Dict[int, Stream] = {}
        self.events: Dict[int, Event] = {}
        self.memory: Dict[int, Tuple[mmap, int, str]] = {}  # start: memory, device, file
        self.imported: Dict[int, Tuple[mmap, int, str]] = {}
        self.peers: Set[Tuple[int, int]] = set()
        self.pinned: Dict[int, int] = {}
        self.pinnable = True
        self.broken: Optional[int] = None  # a status that every event has from now on
        self.copies = self.launches = 0

    def allocate(self, nbytes: int) -> int:
        handle, path = tempfile.mkstemp(dir=self.folder)
        os.ftruncate(handle, nbytes)
        memory = mmap(handle, nbytes)
        os.close(handle)
        start = _start(memory)
        self.memory[start] = (memory, self.device[-1], path)
        return start

    def allocation(self, pointer: int) -> int:
        for start, (memory, _, _) in self.memory.items():
            if start <= pointer < start + len(memory):
                return start
        raise RuntimeError(f"cuMemGetAddressRange: CUDA driver error 1 ({pointer:x})")

    def check_access(self, pointers: Any, nbytes: int) -> None:
        """Raise unless the current device can use what lies there."""
        here = self.device[-1]
        for pointer in map(int, pointers):
            for start, (memory, device, _) in [*self.memory.items(), *self.imported.items()]:
                if start <= pointer and pointer + nbytes <= start + len(memory):
                    own = device == here or (start in self.memory and (here, device) in self.peers)
                    if own:
                        break
            else:
                raise CUDARuntimeError(700, f"GPU {here} cannot use {pointer:x}")

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Forget afterwards what the block has made: the tests make thousands of things."""
        kept = [(known, set(known)) for known in (self.streams, self.events, self.memory)]
        yield
        for known, before in kept:
            for key in set(known) - before:
                del known[key]  # type: ignore[attr-defined]
        self.current.clear()

    def drive_all(self) -> None:
        for stream in list(self.streams.values()):
            stream.drive()

    def started(self, stream: Stream) -> None:
        if self.order == "early":
            stream.drive()
        elif self.order == "mixed":
            for other in list(self.streams.values()):
                if self.random.random() < 0.4:
                    other.drive(self.random.randint(1, 3))


machine: Machine  # the one that is installed


def _start(memory: Any) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class Device:
    def __init__(self, device: int) -> None:
        assert 0 <= device < _DEVICES, device
        self.id, self.attributes = device, {"MultiProcessorCount": 2}

    def __enter__(self) -> None:
        machine.device.append(self.id)

    def __exit__(self, *_: Any) -> None:
        machine.device.pop()


class Stream:
    def __init__(self, non_blocking: bool = False) -> None:
        self.device, self.ptr = machine.device[-1], next(machine.numbers)
        self.work: List[Callable[[], bool]] = []
        self.started = self.over = 0
        self._busy = False
        machine.streams[self.ptr] = self

    def __enter__(self) -> None:
        if machine.device[-1] != self.device:
            raise CUDARuntimeError(400, "a stream of another device")
        machine.current.setdefault(self.device, [Stream()]).append(self)

    def __exit__(self, *_: Any) -> None:
        machine.current[self.device].pop()

    def start(self, work: Callable[[], bool]) -> None:
        if machine.device[-1] != self.device:
            raise CUDARuntimeError(400, "a stream of another device")
        self.add(work)

    def add(self, work: Callable[[], bool]) -> None:
        self.work.append(work)
        self.started += 1
        machine.started(self)

    def wait_event(self, event: Event) -> None:
        stream, place = event.stream, event.place
        self.add(lambda: stream.over >= place or stream.drive(place - stream.over) >= place)

    def drive(self, steps: int = 1 << 30) -> int:
        """Do at most so many pieces of work; return how many are over in all."""
        while self.work and steps > 0 and not self._busy:
            self._busy = True
            done = self.work[0]()
            self._busy = False
            if not done:
                break
            self.work.pop(0)
            self.over += 1
            steps -= 1
        return self.over


def get_current_stream() -> Stream:
    stack = machine.current.setdefault(machine.device[-1], [])
    if not stack:
        stack.append(Stream())
    return stack[-1]


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.ptr, self.asked = next(machine.numbers), False
        machine.events[self.ptr] = self

    def record(self) -> None:
        self.stream = get_current_stream()
        self.place = self.stream.started


def eventQuery(ptr: int) -> int:
    event = machine.events[ptr]
    if machine.broken is not None:
        return machine.broken
    if not event.asked:  # even what is over takes a while to be seen
        event.asked = True
        return 600
    if event.stream.drive(event.place - event.stream.over) < event.place:
        machine.drive_all()
    return 0 if event.stream.over >= event.place else 600


def memcpyAsync(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    assert kind == 4
    machine.copies += 1

    def work() -> bool:
        ctypes.memmove(target, source, nbytes)
        return True

    machine.streams[stream].start(work)


def deviceCanAccessPeer(device: int, peer: int) -> bool:
    assert device != peer
    return not machine.apart


def deviceEnablePeerAccess(peer: int) -> None:
    pair = (machine.device[-1], peer)
    if pair in machine.peers:
        raise CUDARuntimeError(704)
    machine.peers.add(pair)


def deviceGetPCIBusId(device: int) -> str:
    return f"0000:{machine.first + device:02x}:00.0"


def ipcGetMemHandle(pointer: int) -> bytes:
    if machine.private:
        raise CUDARuntimeError(801, "not supported")
    assert pointer in machine.memory, "handles are those of whole allocations"
    return machine.memory[pointer][2].encode().ljust(64, b"\0")


def ipcOpenMemHandle(handle: bytes) -> int:
    path, here = handle.rstrip(b"\0").decode(), machine.device[-1]
    assert all(path != other for _, _, other in machine.memory.values()), "an own handle"
    assert all((here, path) != known[1:] for known in machine.imported.values()), "mapped twice"
    with open(path, "r+b") as file:
        memory = mmap(file.fileno(), 0)
    machine.imported[_start(memory)] = (memory, here, path)
    return _start(memory)


def ipcCloseMemHandle(pointer: int) -> None:
    assert machine.imported[pointer][1] == machine.device[-1]
    del machine.imported[pointer]


def hostRegister(pointer: int, nbytes: int, flags: int) -> None:
    if not machine.pinnable:
        raise CUDARuntimeError(712, "no room")
    assert flags == 1 and pointer not in machine.pinned
    machine.pinned[pointer] = nbytes


def hostUnregister(pointer: int) -> None:
    del machine.pinned[pointer]


class Pointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def alloc(nbytes: int) -> Pointer:
    return Pointer(machine.allocate(nbytes))


class Array:
    """A vector on a device; `host` is its memory."""

    def __init__(self, values: np.ndarray, device: int, offset: int = 0) -> None:
        with Device(device):
            start = machine.allocate(values.nbytes + offset + 1)
        self.device, self.data = Device(device), Pointer(start + offset)
        self._memory = machine.memory[start][0]
        self.host = np.frombuffer(self._memory, np.uint8, values.nbytes, offset).view(values.dtype)
        self.host[:] = values
        for name in ("dtype", "size", "shape", "strides", "ndim", "nbytes", "itemsize", "flags"):
            setattr(self, name, getattr(self.host, name))
        self.__cuda_array_interface__: Dict[str, Any] = {}


class Function:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, grid: tuple, block: tuple, arguments: tuple) -> None:
        sources, n, targets, m, length, divisor = arguments
        assert grid[0] <= 16 and block == (256,)
        inside = np.dtype(_first_type(self.name)).itemsize
        outside = np.dtype(_last_type(self.name)).itemsize
        machine.check_access(sources["at"][0, :n], int(length) * inside)
        machine.check_access(targets["at"][0, :m], int(length) * outside)
        if divisor["weight"][0]:
            machine.check_access(divisor["weight"], 4)
        machine.launches += 1

        def work() -> bool:
            kernel_library.start(self.name, grid[0], 7, arguments)
            return True

        get_current_stream().start(work)


def _first_type(name: str) -> str:
    first = name.split("_")[0]
    return f"i{name[-1]}" if first == "keep" else first


def _last_type(name: str) -> str:
    return name.split("_")[-2] if "_to_" in name else _first_type(name)


class RawModule:
    def __init__(self, code: str, options: tuple) -> None:
        assert "extern" in code and options == ("--std=c++14",)

    def get_function(self, name: str) -> Function:
        assert hasattr(kernel_library.library(), name), name
        return Function(name)


def _modules() -> Dict[str, Any]:
    from . import fake_nccl

    runtime = types.SimpleNamespace(
        memcpyDefault=4,
        CUDARuntimeError=CUDARuntimeError,
        **{f.__name__: f for f in _RUNTIME},
    )
    cuda = types.ModuleType("cupy.cuda")
    vars(cuda).update(runtime=runtime, nccl=fake_nccl, alloc=alloc)
    vars(cuda).update(Device=Device, Stream=Stream, Event=Event)
    vars(cuda).update(get_current_stream=get_current_stream, alloc_pinned_memory=np.zeros)
    cupy = types.ModuleType("cupy")
    vars(cupy).update(cuda=cuda, RawModule=RawModule, __version__=machine.version)
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": fake_nccl}


_RUNTIME = (
    eventQuery,
    memcpyAsync,
    deviceCanAccessPeer,
    deviceEnablePeerAccess,
    deviceGetPCIBusId,
    ipcGetMemHandle,
    ipcOpenMemHandle,
    ipcCloseMemHandle,
    hostRegister,
    hostUnregister,
)


@contextmanager
def installed(**kinds: Any) -> Iterator[Machine]:
    """Let ``import cupy`` find this one, with a machine of these kinds."""
    global machine
    machine = Machine(**kinds)
    made, allocation = _modules(), ipc.allocation
    kept = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    ipc.allocation = machine.allocation
    _forget()
    try:
        yield machine
    finally:
        _forget()
        ipc.allocation = allocation
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
        shutil.rmtree(machine.folder)


def _forget() -> None:
    for cache in (kernels._module, kernels._function, kernels._most_blocks):
        cache.cache_clear()
