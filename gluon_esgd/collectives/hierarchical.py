"""``hierarchical``: shared memory inside a machine, a ring per local rank between machines.

The first ``m`` ranks of each machine own a part each of the vectors, where ``m`` is the number of
ranks on the smallest machine. An owner reduces its part over its machine, takes it around a ring of
the owners of that part on all machines, and writes the result to all vectors of its machine. So all
links are used at once, and a machine sends ``2 (N - 1) / N`` of one vector in all. In a broadcast
owners pass their part along a chain of machines, and each of these sends one vector at most.
"""

from __future__ import annotations

import numpy as np

from ..communicator import Communicator, movable
from . import shared
from .chain import pass_along
from .operations import accumulator
from .parts import part
from .registry import Run, Task, register
from .ring import around

__all__ = ["allreduce", "broadcast"]


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


@register("broadcast", "hierarchical", memory="node")
def broadcast(task: Task) -> Run:
    """Take parts from the root's memory, pass them from machine to machine, write them there."""
    if len(task.comm.nodes) == 1:
        return shared.broadcast(task)
    comm, peers, vectors = task.comm, task.comm.peers, [movable(v) for v in task.on_node()]
    at = next(k for k, ranks in enumerate(comm.nodes) if task.root in ranks)
    # On the root's machine its vector is the source, elsewhere that of the owner itself.
    source = comm.nodes[at].index(task.root) if comm.node_rank == at else comm.local_rank
    others = [vector for rank, vector in enumerate(vectors) if rank != source]
    owners = min(len(ranks) for ranks in comm.nodes)
    span = part(task.array.size, comm.local_rank, owners)
    own, targets = vectors[source][span], [vector[span] for vector in others]

    def write(piece: slice) -> None:
        for target in targets:
            np.copyto(target[piece], own[piece])

    def run(what: str) -> None:
        comm.arrive(what)
        if peers is not None:
            before = peers.sent_bytes
            pass_along(own, peers, _of_node(comm, at), what, write)
            comm.sent_bytes += peers.sent_bytes - before
        comm.meet(what)

    return run


def _of_node(comm: Communicator, node: int) -> int:
    """Return which of this rank's peers is on machine `node`; they are numbered by rank."""
    peers = [ranks[comm.local_rank] for ranks in comm.nodes]
    return sorted(peers).index(peers[node])
