"""The KVStore as the agent uses it: one flat vector per trainer, cut into keys.

With CPU arrays the store's own buffer of a key *is* the array that was pushed
last, and a pull lands there whatever ``out`` says. So each pull is made into
the buffer that was pushed last, which saves a copy, and whatever must survive
the pull lies in the other buffer. ``x`` is pushed only where its place is to
take the result.
"""

from __future__ import annotations

import ctypes
from typing import Any, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from ..optim.elastic import weight_change
from . import contract as contracts
from . import pslite
from .difference import center_difference, distance_to
from .layout import CARRIED, kind_spans
from .memory import Memory
from .server import ACCUMULATE, COMMAND

__all__ = ["Store", "StoredVector"]

_X = -1  # the number of x among the buffers, for `Memory.view`

Span = Tuple[int, int, int]


def _acknowledged(arrays: Sequence[Any]) -> None:
    """Wait until the servers have answered the pushes that read `arrays`."""
    for array in arrays:
        mx.base.check_call(mx.base._LIB.MXNDArrayWaitToWrite(array.handle))


class Store:
    """This process's KVStore; making it waits for all nodes of the job.

    Parameters
    ----------
    scheduler : str
        host:port of the scheduler.
    client, num_clients, num_servers : int
        This client's number and the counts of the job.
    sync : bool
        Servers hand back each round's sum; else they accumulate what arrives.
    """

    def __init__(
        self, scheduler: str, client: int, num_clients: int, num_servers: int, sync: bool
    ) -> None:
        self.client, self.num_clients, self.sync = client, num_clients, sync
        pslite.set_role("worker", scheduler, num_clients, num_servers)
        self.kv = mx.kv.create("dist_sync" if sync else "dist_async")
        mx.base.check_call(
            mx.base._LIB.MXKVStoreSetBarrierBeforeExit(self.kv.handle, ctypes.c_int(0))
        )
        if not sync:
            self.kv._send_command_to_servers(COMMAND, ACCUMULATE)

    def barrier(self) -> None:
        """Wait for the agents of all clients."""
        self.kv._barrier()

    def add_up(self, key: str, row: np.ndarray) -> np.ndarray:
        """Return the table whose row i is client i's `row`; all clients call it."""
        shape = (self.num_clients, row.size)
        table = np.zeros(shape, np.float32)
        table[self.client] = row
        if not self.sync:  # what this client added before lies there still
            table[self.client] -= self._pull(key, shape)[self.client]
        mine = mx.nd.array(table, dtype=np.float32)
        self.kv.push(key, mine)
        _acknowledged([mine])
        self.barrier()
        return self._pull(key, shape)

    def _pull(self, key: str, shape: Tuple[int, int]) -> np.ndarray:
        out = mx.nd.zeros(shape)
        self.kv.pull(key, out=out)
        return out.asnumpy()


class StoredVector:
    """One trainer's center: the keys in the store and the mailbox's memory.

    Every client makes the same ones in the same order; it waits for all of them.
    """

    def __init__(
        self, store: Store, name: str, memory: Memory, contract: Mapping[str, int]
    ) -> None:
        self._store, self._name, self._memory, self._contract = store, name, memory, contract
        self._keys = [f"{name}.{i}" for i in range(len(memory.chunks))]
        self._arrays = {number: self._cut(number) for number in (_X, 0, 1)}
        self._pushed: Optional[int] = None  # which buffer is the store's own now
        shape = contracts.table_shape(store.num_clients)
        zeros = [mx.nd.zeros(stop - start) for start, stop in memory.chunks]
        store.kv.init([f"{name}.contract", *self._keys], [mx.nd.zeros(shape), *zeros])

    def _cut(self, number: int) -> List[Any]:
        view = self._memory.view(number)
        return [
            mx.nd.from_numpy(view[start:stop], zero_copy=True)
            for start, stop in self._memory.chunks
        ]

    def _push(self, number: int, first: int = 0, last: Optional[int] = None) -> List[Any]:
        """Push buffer `number`, or its chunks ``[first, last)``; return what to wait for."""
        arrays = self._arrays[number][first:last]
        self._store.kv.push(self._keys[first:last], arrays)
        self._memory.count_moved(sum(a.size for a in arrays))
        if number != _X:
            self._pushed = number
        return arrays

    def _pull(self, number: int, first: int = 0, last: Optional[int] = None) -> None:
        arrays = self._arrays[number][first:last]
        self._store.kv.pull(self._keys[first:last], out=arrays)
        for array in arrays:
            array.wait_to_read()
        self._memory.count_moved(sum(a.size for a in arrays))

    def pull(self) -> int:
        """Fetch the center; return the buffer that now holds it."""
        memory = self._memory
        target = 1 - max(memory.whole, 0) if self._pushed is None else self._pushed
        if target == memory.whole:  # keep this center whole until the next one is
            np.copyto(memory.buffers[1 - target], memory.buffers[target])
            memory.set_center(memory.version, 1 - target)
        self._pull(target)
        memory.set_center(memory.version + 1, target)
        return target

    def pull_together(self) -> None:
        """Fetch a center that is the same on all clients; all clients call it."""
        self._store.barrier()
        self.pull()
        self._store.barrier()

    def rebase(self) -> None:
        """Count the client's changes from the last whole center on."""
        np.copyto(self._memory.base, self._memory.buffers[self._memory.whole])

    def exchange(self, rule: str, alpha: float) -> None:
        """Exchange x with the center by `rule`; return when the servers have acknowledged."""
        memory = self._memory
        spans = kind_spans(memory.sizes.tolist(), memory.kinds.tolist())
        if rule == "esgd":
            c = memory.buffers[self.pull()]
            waiting = self._push_difference(rule, alpha, c, spans)
            self._measure(c, spans)
            _acknowledged(waiting)
        else:
            _acknowledged(self._push_difference(rule, alpha, memory.base, spans))
            c = memory.buffers[self.pull()]
            self._measure(c, spans)
            for kind, start, stop in spans:
                if kind != CARRIED:  # what is frozen here counts from where it was frozen
                    memory.base[start:stop] = c[start:stop]

    def _push_difference(
        self, rule: str, alpha: float, center: np.ndarray, spans: Sequence[Span]
    ) -> List[Any]:
        free = 1 - self._memory.whole
        x, out = self._memory.x, self._memory.buffers[free]
        center_difference(rule, alpha, x, center, spans, out)
        return self._push(free)

    def _measure(self, center: np.ndarray, spans: Sequence[Span]) -> None:
        self._memory.distance = distance_to(center, self._memory.x, spans)

    def seed(self, seeder: bool) -> None:
        """Make the seeder's x the center, once the clients' contracts are found equal.

        All clients call it. It may be called again: the center is then replaced.

        Raises
        ------
        ValueError
            On all clients, naming what differs between them.
        """
        row = contracts.row(self._contract, seeder)
        table = self._store.add_up(f"{self._name}.contract", row)
        found = contracts.faults(table, self._contract)
        if found:
            raise ValueError(f"the clients do not match: {'; '.join(found)}")
        if self._store.sync:
            self._seed_round(seeder)
        else:
            self._seed_by_difference(seeder)

    def _seed_round(self, seeder: bool) -> None:
        memory, free = self._memory, 1 - max(self._memory.whole, 0)
        np.copyto(memory.buffers[free], memory.x if seeder else np.float32(0))
        _acknowledged(self._push(free))
        self.pull()

    def _seed_by_difference(self, seeder: bool) -> None:
        memory = self._memory
        if seeder:  # zeros on the servers at first, another center later
            c = memory.buffers[self.pull()]
            free = 1 - memory.whole
            weight_change(memory.x, c, out=memory.buffers[free])
            _acknowledged(self._push(free))
        self.pull_together()
        self.rebase()

    def reduce(self, first: int, last: int) -> None:
        """Sum chunks ``[first, last)`` of x over all clients, in place; all clients call it."""
        _acknowledged(self._push(_X, first, last))
        self._pull(_X, first, last)
