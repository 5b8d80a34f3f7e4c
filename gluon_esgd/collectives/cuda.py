"""``cuda``: one kernel reads the vectors of all GPUs of a machine where they lie.

As ``shared`` does on the CPU: of ``n`` vectors, the device of vector ``g`` combines part ``g`` of
all, in the order of ranks and of each rank's devices, and writes the result into all. Each device
reads ``n - 1`` and writes ``n - 1`` parts of ``1 / n`` of a vector over the links between GPUs, the
least that any in-place allreduce can do, and the bits are the same everywhere.

Devices of one process reach each other by peer access, those of other processes through CUDA IPC.
Where either is not allowed, and for ranks on several machines, ``host_staged`` is taken.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import numpy as np

from ..communicator import Communicator
from .devices import Queue, address, device_of, load, reach, ready, wait
from .ipc import Imports, export
from .kernels import MOST, Launch, keeping, narrowing, reducing, widening
from .operations import accumulator
from .parts import part
from .registry import Instead, Run, Task, register

__all__ = ["allreduce", "broadcast"]

_OTHER = "host_staged"


class _Group:
    """The vectors of all ranks of a machine, as each device of this process finds them.

    Attributes
    ----------
    first : int
        Number of this rank's first vector among all.
    queues : list of Queue
        For each vector of this rank, on its device.
    seen : list of list of int
        For each vector of this rank: the addresses of all vectors, for its device.
    starts : list of int
        Number of each rank's first vector.
    """

    def __init__(self, task: Task) -> None:
        self._imports, comm = Imports(), task.comm
        offers = _agreed(_offer(task), "its vectors", comm)
        self.starts = np.cumsum([0, *(len(o["vectors"]) for o in offers)])[:-1].tolist()
        self.first = self.starts[comm.rank]
        try:
            self.seen, fault = [self._find(task, offers, v) for v in task.vectors], None
        except Exception as error:  # CUDA's own, whatever is in the way
            self.seen, fault = [], f"rank {comm.rank}: {error}"
        try:
            _agreed({"fault": fault}, "its neighbours' vectors", comm)
        except Instead:
            self._imports.close()
            raise
        self.queues = [Queue(device_of(v)) for v in task.vectors]

    def _find(self, task: Task, offers: List[Dict[str, Any]], vector: Any) -> List[int]:
        """Where the device of `vector` finds all vectors."""
        found: List[int] = []
        for rank, offer in enumerate(offers):
            if rank == task.comm.rank:
                found += map(address, task.vectors)
            else:
                found += [self._imports.open(device_of(vector), v) for v in offer["vectors"]]
        return found


def _offer(task: Task) -> Dict[str, Any]:
    """What this rank has for the others: its vectors, or what is in the way."""
    offer: Dict[str, Any] = {"fault": _obstacle(task), "vectors": []}
    if offer["fault"] is None:
        try:
            alone = task.comm.size == 1
            offer["vectors"] = [None if alone else export(v) for v in task.vectors]
        except Exception as error:
            offer["fault"] = f"rank {task.comm.rank}: memory cannot be shared: {error}"
    return offer


def _obstacle(task: Task) -> Optional[str]:
    """Why devices cannot work on each other's memory, as far as this rank sees."""
    if len(task.comm.nodes) > 1:
        return f"the ranks are on {len(task.comm.nodes)} machines"
    if task.count > MOST:
        return f"there are {task.count} vectors, more than {MOST}"
    devices = {device_of(v) for v in task.vectors}
    for device in sorted(devices):
        said = reach(device, devices)
        if said is not None:
            return f"rank {task.comm.rank}: {said}"
    return None


def _agreed(mine: Dict[str, Any], what: str, comm: Communicator) -> List[Dict[str, Any]]:
    """Exchange what each rank has; raise Instead, on all ranks, for a fault of any; collective."""
    everybody = comm.allgather(mine, f"each rank's word on {what}")
    for said in everybody:
        if said["fault"] is not None:
            raise Instead(_OTHER, said["fault"])
    return everybody


def _begin(task: Task, what: str) -> None:
    """Wait until all vectors of all ranks are there to be read."""
    task.comm.enter(what)
    wait(ready(task.vectors), task.comm, what)
    task.comm.meet(what)
    task.comm.check_same(what)


def _make(launches: List[Launch], queues: List[Queue], comm: Communicator, what: str) -> None:
    for launch in launches:
        launch()
    wait([queue.mark() for queue in queues], comm, what)


class _Tail:
    """The sum of the tails of all vectors, made on the device of one of them.

    Attributes
    ----------
    address : int
        Where it is, in the type of the sums; the weight comes first.
    add : Launch
        Makes it.
    write : Launch
        Writes it into the vector.
    """

    def __init__(self, task: Task, vector: Any, queue: Queue, seen: List[int]) -> None:
        dtype, length = task.array.dtype, task.op.tail
        behind = (task.array.size - length) * dtype.itemsize
        with queue.current():
            self._memory = load().cuda.alloc(length * accumulator(dtype).itemsize)
        self.address = int(self._memory.ptr)
        sources = [at + behind for at in seen]
        self.add = Launch(widening(dtype, task.op), sources, [self.address], length, queue)
        own = address(vector) + behind
        self.write = Launch(narrowing(dtype), [self.address], [own], length, queue)


@register("allreduce", "cuda", memory="device", compresses=True)
def allreduce(task: Task) -> Run:
    """Reduce a part on each device and write it to all vectors."""
    group, comm, op = _Group(task), task.comm, task.op
    each = list(zip(task.vectors, group.queues, group.seen))
    tails = [_Tail(task, *one) for one in each] if op.tail else []
    work = [tail.add for tail in tails]
    for k, (_, queue, seen) in enumerate(each):
        by: Dict[str, Any] = {}
        if op.divides:
            by = {"weight": tails[k].address} if tails else {"divisor": float(task.count)}
        work.append(_reduction(task, group.first + k, queue, seen, by))

    def run(what: str) -> None:
        _begin(task, what)
        _make(work, group.queues, comm, what)
        comm.meet(what)
        if tails:  # only now has everybody read them
            _make([tail.write for tail in tails], group.queues, comm, what)

    return run


def _reduction(
    task: Task, number: int, queue: Queue, seen: List[int], by: Dict[str, Any]
) -> Launch:
    """Part `number` of all vectors, combined and written to all of them."""
    dtype = task.array.dtype
    own = part(task.array.size - task.op.tail, number, task.count)
    places = [at + own.start * dtype.itemsize for at in seen]
    return Launch(reducing(dtype, task.op), places, places, own.stop - own.start, queue, **by)


@register("broadcast", "cuda", memory="device")
def broadcast(task: Task) -> Run:
    """Read the root's first vector where it lies."""
    group, comm, dtype = _Group(task), task.comm, task.array.dtype
    root = group.starts[task.root]
    launches = [
        Launch(keeping(dtype.itemsize), [seen[root]], [address(vector)], vector.size, queue)
        for number, (vector, queue, seen) in enumerate(
            zip(task.vectors, group.queues, group.seen), group.first
        )
        if number != root
    ]

    def run(what: str) -> None:
        _begin(task, what)
        _make(launches, group.queues, comm, what)
        comm.meet(what)

    return run
