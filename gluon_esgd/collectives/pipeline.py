"""Chunks of vectors on GPUs on their way through pinned host memory, and a collective there."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from ..communicator import Communicator
from ..node_memory import Mapping
from .choice import choose
from .devices import Queue, device_of, load, pin, ready, wait
from .memory import share
from .prepared import prepared
from .registry import Run, Task

__all__ = ["Pipeline", "Step"]

_log = logging.getLogger(__name__)

Step = Callable[[], None]


class _Memory:
    """Pinned host memory, shared with the ranks of the machine where it can be; collective.

    Parameters
    ----------
    nbytes : int
        The same on all ranks.
    comm : Communicator
    """

    def __init__(self, nbytes: int, comm: Communicator) -> None:
        self.mapping: Optional[Mapping] = share(nbytes, comm)
        if self.mapping is None:
            self._kept = load().cuda.alloc_pinned_memory(nbytes)
            self.bytes = np.frombuffer(self._kept, np.uint8, nbytes)
            return
        self.bytes = self.mapping.parts[self.mapping.own][:nbytes]
        pointer = self.bytes.ctypes.data
        said = pin(pointer, nbytes)
        if said is not None:
            _log.warning("host memory cannot be pinned, so copies are slower: %s", said)
        else:  # before the mapping goes, which this object holds
            unpin = weakref.finalize(self, load().cuda.runtime.hostUnregister, pointer)
            unpin.atexit = False


class Pipeline:
    """Chunks on their way down to the host and up again.

    Parameters
    ----------
    task : Task
    collective : str
        What is made on the host.
    dtype : dtype
        Elements there.
    length : int
        Of the longest chunk.
    buffers : int, default 2
        Where chunks lie on the host, in turn; one is enough for one chunk.
    """

    def __init__(
        self, task: Task, collective: str, dtype: Any, length: int, buffers: int = 2
    ) -> None:
        self._task, self._collective, self.dtype = task, collective, np.dtype(dtype)
        nbytes = length * self.dtype.itemsize
        room = -(-nbytes // 64) * 64
        self._memory = _Memory(buffers * room, task.comm)
        self._buffers = [
            self._memory.bytes[k * room : k * room + nbytes].view(self.dtype)
            for k in range(buffers)
        ]
        self._hosts: Dict[Any, Run] = {}
        self.down = Queue(device_of(task.array))
        self.up = {device: Queue(device) for device in sorted(map(device_of, task.vectors))}
        self._chunks: List[tuple] = []

    def next_buffer(self, size: int) -> np.ndarray:
        """Return where the next chunk of `size` elements lies on the host."""
        return self._buffers[len(self._chunks) % len(self._buffers)][:size]

    def add(
        self, size: int, down: Sequence[Step], up: Sequence[Step], compresses: bool = False
    ) -> None:
        """Add a chunk, with what starts its copies down and up; collective."""
        array, comm = self.next_buffer(size), self._task.comm
        key = (array.ctypes.data, size, compresses)
        if key not in self._hosts:
            inside = replace(
                self._task,
                vectors=[array],
                op=self._task.op.bare,
                home=self._memory.mapping,
                compresses=compresses,
            )
            name = _agreed_choice(self._collective, array.nbytes, comm, compresses)
            self._hosts[key] = prepared(self._collective, name, inside)[1]
        self._chunks.append((down, self._hosts[key], up))

    def run(self, what: str) -> None:
        """Make the collective."""
        comm, ups = self._task.comm, list(self.up.values())
        comm.enter(what)
        begun = ready(self._task.vectors)
        for queue in (self.down, *ups):
            queue.after(begun)
        landed = [self._start_down(0, [])]
        written: List[List[Any]] = [[]]
        for number, (_, host, up) in enumerate(self._chunks):
            if number + 1 < len(self._chunks):
                # Into the buffer of the chunk before this one, once that has left it.
                landed.append(self._start_down(number + 1, written[number]))
            wait([landed[number]], comm, what)
            host(what)
            for step in up:
                step()
            written.append([queue.mark() for queue in ups])
        wait(written[-1], comm, what)

    def _start_down(self, number: int, left: Sequence[Any]) -> Any:
        self.down.after(left)
        for step in self._chunks[number][0]:
            step()
        return self.down.mark()


def _agreed_choice(collective: str, nbytes: int, comm: Communicator, compresses: bool) -> str:
    """Return rank 0's choice for vectors in host memory; collective."""
    choice = choose(collective, nbytes, comm, compresses)
    return str(comm.allgather(choice, "a choice for host memory")[0])
