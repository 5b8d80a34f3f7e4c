"""``nccl``: NVIDIA's library, through CuPy.

The order in which it adds up is its own, the same for equal vectors on the same machines, and its
bits are the same on all ranks. float16 is widened first, so that sums are made in float32. Its
`min` and `max` may lose NaN. Parts of a `reduce_scatter` or an `allgather` must be equal, and a
process takes part in them with one vector; elsewhere ``host_staged`` is taken.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, Dict, List, Tuple

import numpy as np

from ..communicator import Communicator
from .devices import Queue, address, device_of, has_nccl, load, ready, wait
from .kernels import Launch, narrowing, widening
from .operations import OPERATIONS, accumulator
from .parts import part
from .registry import Instead, Run, Task, register

__all__ = ["allgather", "allreduce", "broadcast", "reduce_scatter"]

_OTHER = "host_staged"

# Communicators of NCCL by what all ranks bring: making one takes seconds.
_made: weakref.WeakKeyDictionary[Communicator, Dict[str, List[Any]]] = weakref.WeakKeyDictionary()


class _Clique:
    """The devices of all ranks, as NCCL knows them; collective.

    Attributes
    ----------
    first : list of int
        Number of each rank's first vector.
    queues : list of Queue
        For each vector of this rank, on its device.
    """

    def __init__(self, task: Task) -> None:
        self._comm, self._task = task.comm, task
        everybody = task.comm.allgather(_offer(task), "the devices of each rank")
        for said in everybody:
            if said["fault"] is not None:
                raise Instead(_OTHER, said["fault"])
        devices = [d for said in everybody for d in said["devices"]]
        if len(set(devices)) < len(devices):
            raise Instead(_OTHER, f"NCCL wants a GPU for each vector, and these are {devices}")
        self.first = np.cumsum([0, *(len(said["devices"]) for said in everybody)])[:-1].tolist()
        known = _made.setdefault(task.comm, {})
        key = " ".join(devices)
        if key not in known:
            known[key] = self._meet(len(devices))
        self._members = known[key]
        self.queues = [Queue(device_of(v)) for v in task.vectors]

    def _meet(self, count: int) -> List[Any]:
        """Make this rank's communicators of NCCL.

        NCCL waits inside for the others, without a limit; hence in threads, one for each device.
        """
        nccl, comm = load().cuda.nccl, self._comm
        mine = [int(b) % 256 for b in nccl.get_unique_id()] if comm.rank == 0 else None
        number = _as_cupy_has_it(comm.allgather(mine, "the start of NCCL")[0])
        made: Dict[int, Any] = {}

        def make(k: int, device: int) -> None:
            try:
                with load().cuda.Device(device):
                    made[k] = nccl.NcclCommunicator(count, number, self.first[comm.rank] + k)
            except Exception as error:
                made[k] = error

        vectors = self._task.vectors
        for k, vector in enumerate(vectors):
            threading.Thread(target=make, args=(k, device_of(vector)), daemon=True).start()
        comm.wait_for(lambda: len(made) == len(vectors), "the start of NCCL")
        members = [made[k] for k in range(len(vectors))]
        faults = [f"rank {comm.rank}: {m}" for m in members if isinstance(m, Exception)]
        for said in comm.allgather(faults, "the start of NCCL"):
            if said:
                raise Instead(_OTHER, f"NCCL does not start: {said[0]}")
        return members

    def make(self, call: Callable[[int, Any, int], None]) -> None:
        """Start ``call(k, member, stream)`` for each vector `k` of this rank, as one."""
        nccl = load().cuda.nccl
        nccl.groupStart()
        try:
            for k, (member, queue) in enumerate(zip(self._members, self.queues)):
                with queue.current():
                    call(k, member, queue.pointer)
        finally:
            nccl.groupEnd()

    def run(self, steps: List[Callable[[], None]], what: str) -> None:
        """Make `steps` in the queues when all vectors are there, and wait."""
        comm = self._comm
        # NCCL connects at its first use, waiting inside; so those of this machine meet before.
        comm.arrive(what)
        begun = ready(self._task.vectors)
        for queue in self.queues:
            queue.after(begun)
        try:
            for step in steps:
                step()
            wait([queue.mark() for queue in self.queues], comm, what)
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        """Let kernels that wait for others end, so that this process can."""
        for member in self._members:
            member.abort()
        _made.pop(self._comm, None)


def _as_cupy_has_it(number: List[int]) -> Any:
    """A unique id: bytes since CuPy 14, a tuple of signed numbers before."""
    if int(load().__version__.split(".")[0]) >= 14:
        return bytes(number)
    return tuple(b - 256 if b > 127 else b for b in number)


def _offer(task: Task) -> Dict[str, Any]:
    if not has_nccl():
        fault = f"rank {task.comm.rank}: CuPy finds no NCCL; install nvidia-nccl for its CUDA"
        return {"fault": fault}
    bus_id = load().cuda.runtime.deviceGetPCIBusId
    places = [f"{task.comm.node_rank}/{bus_id(device_of(v))}" for v in task.vectors]
    return {"fault": None, "devices": places}


def _types(dtype: Any, op: str = "sum") -> Tuple[int, int]:
    """NCCL's numbers for a type and an operation."""
    nccl = load().cuda.nccl
    kind = getattr(nccl, f"NCCL_{np.dtype(dtype).name.upper()}")
    return kind, getattr(nccl, f"NCCL_{op.upper() if op in ('min', 'max') else 'SUM'}")


def _reduced(
    task: Task, clique: _Clique, span: slice, call: Callable[[int, Any, int, int], None]
) -> Run:
    """Reduce by ``call(k, member, address, stream)``, then divide `span` of each vector.

    The address is that of vector `k`, or of a copy in the type of the sums.
    """
    dtype, size, op = task.array.dtype, task.array.size, task.op
    sums = accumulator(dtype)
    places = [address(v) for v in task.vectors]
    before: List[Callable[[], None]] = []
    after: List[Callable[[], None]] = []
    kept = []
    if sums != dtype:
        for k, (vector, queue) in enumerate(zip(task.vectors, clique.queues)):
            with queue.current():
                kept.append(load().cuda.alloc(size * sums.itemsize))
            places[k] = int(kept[-1].ptr)
            kernel = widening(dtype, OPERATIONS["sum"])
            before.append(Launch(kernel, [address(vector)], [places[k]], size, queue))
    end = size - op.tail
    for at, vector, queue in zip(places, task.vectors, clique.queues):
        by: Dict[str, Any] = {}
        if op.divides:
            weight = at + end * sums.itemsize
            by = {"weight": weight} if op.tail else {"divisor": float(task.count)}
        if by or sums != dtype:
            stop, kernel = min(span.stop, end), narrowing(dtype)
            for a, b, divides in ((span.start, stop, by), (stop, span.stop, {})):
                source, target = at + a * sums.itemsize, address(vector) + a * dtype.itemsize
                after.append(Launch(kernel, [source], [target], b - a, queue, **divides))

    def reduce() -> None:
        clique.make(lambda k, member, stream: call(k, member, places[k], stream))

    def run(what: str) -> None:
        assert len(kept) in (0, len(places))
        clique.run([*before, reduce, *after], what)

    return run


@register("allreduce", "nccl", memory="device")
def allreduce(task: Task) -> Run:
    """``ncclAllReduce``, means as sums that are divided."""
    clique, size = _Clique(task), task.array.size
    kind, op = _types(accumulator(task.array.dtype), task.op.name)

    def call(k: int, member: Any, at: int, stream: int) -> None:
        member.allReduce(at, at, size, kind, op, stream)

    return _reduced(task, clique, slice(0, size), call)


@register("broadcast", "nccl", memory="device")
def broadcast(task: Task) -> Run:
    """``ncclBroadcast`` from the root's first vector."""
    clique, size, places = _Clique(task), task.array.size, [address(v) for v in task.vectors]
    kind, root = _types(task.array.dtype)[0], clique.first[task.root]

    def call(k: int, member: Any, stream: int) -> None:
        member.broadcast(places[k], places[k], size, kind, root, stream)

    return lambda what: clique.run([lambda: clique.make(call)], what)


@register("reduce_scatter", "nccl", memory="device")
def reduce_scatter(task: Task) -> Run:
    """``ncclReduceScatter`` of equal parts."""
    own, clique = _equal_part(task), _Clique(task)
    sums = accumulator(task.array.dtype)
    kind, op = _types(sums, task.op.name)

    def call(k: int, member: Any, at: int, stream: int) -> None:
        part_at = at + own.start * sums.itemsize
        member.reduceScatter(at, part_at, own.stop - own.start, kind, op, stream)

    return _reduced(task, clique, own, call)


@register("allgather", "nccl", memory="device")
def allgather(task: Task) -> Run:
    """``ncclAllGather`` of equal parts."""
    own, clique, dtype = _equal_part(task), _Clique(task), task.array.dtype
    kind, at = _types(dtype)[0], address(task.array)

    def call(k: int, member: Any, stream: int) -> None:
        mine = at + own.start * dtype.itemsize
        member.allGather(mine, at, own.stop - own.start, kind, stream)

    return lambda what: clique.run([lambda: clique.make(call)], what)


def _equal_part(task: Task) -> slice:
    size, ranks = task.array.size, task.comm.size
    if size % ranks or task.count != ranks:
        raise Instead(
            _OTHER,
            f"NCCL wants equal parts of one vector for each rank, and these are {size} elements "
            f"over {ranks} ranks with {task.count} vectors",
        )
    return part(size, task.comm.rank, ranks)
