"""``hierarchical``: shared memory inside a machine, a ring per local rank between machines.

The first ``m`` ranks of each machine own a part each of the vectors, where ``m`` is the number of
ranks on the smallest machine. An owner reduces its part over its machine, takes it around a ring of
the owners of that part on all machines, and writes the result to all vectors of its machine. So all
links are used at once, and a machine sends ``2 (N - 1) / N`` of one vector in all.
"""

from __future__ import annotations

import numpy as np

from . import shared
from .operations import accumulator
from .parts import part
from .registry import Run, Task, register
from .ring import around

__all__ = ["allreduce"]


@register("allreduce", "hierarchical", memory="node", compresses=True)
def allreduce(task: Task) -> Run:
    """Reduce in the machine, between machines, and write in the machine."""
    if len(task.comm.nodes) == 1:
        return shared.allreduce(task)
    comm, peers, op, vectors = task.comm, task.comm.peers, task.op, task.on_node()
    end, array = task.array.size - op.tail, task.array
    tails = [vector[end:] for vector in vectors]
    if peers is not None:
        owners = min(len(ranks) for ranks in comm.nodes)
        span = part(end, comm.local_rank, owners)
        length = span.stop - span.start
        # With the part travels what every owner must know: the weights of all ranks.
        buffer = np.empty(length + op.tail, accumulator(array.dtype))
        parts = [vector[span] for vector in vectors]
        reduction = shared.Reduction(parts, op.bare, [buffer[:length]])
        ring = around(buffer, peers, op, task.compresses)

    def run(what: str) -> None:
        comm.arrive(what)
        if peers is not None:
            reduction.run(None)
            buffer[length:] = np.sum(tails, 0, buffer.dtype)
            before = peers.sent_bytes
            ring.reduce_scatter(what)
            ring.allgather(what)
            comm.sent_bytes += peers.sent_bytes - before
            op.finish(buffer, task.count)
            for part_ in parts:
                np.copyto(part_, buffer[:length], casting="same_kind")
        comm.meet(what)
        if op.tail:  # only now has everybody read it
            if peers is not None:
                array[end:] = buffer[length:]
            comm.meet(what)
            array[end:] = tails[0]
            comm.meet(what)  # before the first rank fills its vector anew

    return run
