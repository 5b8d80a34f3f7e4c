"""The KVStore as the agent uses it: one flat vector per trainer, cut into keys (`keys`).

With CPU arrays the store's own buffer of a key *is* the array that was pushed
last, and a pull lands there whatever ``out`` says. So each pull is made into
the buffer that was pushed last, which saves a copy, and whatever must survive
the pull lies in the other buffer. ``x`` is pushed only where its place is to
take the result.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.kvstore.kvstore import _get_kvstore_server_command_type

from ..optim import Outer
from ..optim.elastic import weight_change
from . import contract as contracts
from . import pslite
from .difference import Span, center_difference, distance_to, is_finite
from .keys import PLAIN, STEP, Keys
from .layout import CARRIED, kind_spans
from .memory import ACKNOWLEDGED, IDLE, PULLING, PUSHING, Memory
from .rounds_in_flight import RoundsInFlight
from .route import Route, acknowledged
from .rule import COMMAND, encode
from .secret import sign

__all__ = ["Store", "StoredVector"]

# What rounding leaves after one is exact after the next, but where the center was far larger.
_CORRECTIONS = 4


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
    outer : mapping of str to float, optional
        The fields of `Outer`: how exchanges move the center. Plain sums unless given.
    compression : {'fp16'}, optional
        Half floats to and from the servers.
    generation : int
        Of the servers.
    secret : str
        Of the job, in hex; empty for servers that were started by hand.
    """

    def __init__(
        self,
        scheduler: str,
        client: int,
        num_clients: int,
        num_servers: int,
        sync: bool,
        outer: Optional[Mapping[str, float]] = None,
        compression: Optional[str] = None,
        generation: int = 0,
        secret: str = "",
    ) -> None:
        self.client, self.num_clients, self.sync = client, num_clients, sync
        self.outer, self.compression = Outer(**(outer or {})), compression
        self.keys = Keys(num_servers)
        pslite.set_role("worker", scheduler, num_clients, num_servers)
        self.kv = mx.kv.create("dist_sync" if sync else "dist_async")
        mx.base.check_call(
            mx.base._LIB.MXKVStoreSetBarrierBeforeExit(self.kv.handle, ctypes.c_int(0))
        )
        if not sync:
            text = sign(bytes.fromhex(secret), generation, encode(self.outer))
            self.kv._send_command_to_servers(COMMAND, text)
        elif compression:  # the servers then add up in float32 what comes and goes in float16
            number = _get_kvstore_server_command_type("kSetMultiPrecision")
            self.kv._send_command_to_servers(number, "")

    @property
    def has_steps(self) -> bool:
        """Whether an exchange needs other keys than those that hold the center."""
        return not self.sync and (self.compression is not None or not self.outer.is_plain)

    def barrier(self) -> None:
        """Wait for the agents of all clients."""
        self.kv._barrier()

    def add_up(self, key: int, row: np.ndarray) -> np.ndarray:
        """Return the table whose row i is client i's `row`; all clients call it."""
        shape = (self.num_clients, row.size)
        table = np.zeros(shape, np.float32)
        table[self.client] = row
        if not self.sync:  # what this client added before lies there still
            table[self.client] -= self._pull(key, shape)[self.client]
        mine = mx.nd.array(table, dtype=np.float32)
        self.kv.push(key, mine)
        acknowledged(mine)
        self.barrier()
        return self._pull(key, shape)

    def _pull(self, key: int, shape: Tuple[int, int]) -> np.ndarray:
        out = mx.nd.zeros(shape)
        self.kv.pull(key, out=out)
        return out.asnumpy()


class StoredVector:
    """One trainer's center: the keys in the store and the mailbox's memory.

    Every client makes the same ones in the same order; it waits for all of them.
    """

    def __init__(self, store: Store, memory: Memory, contract: Mapping[str, int]) -> None:
        self._store, self._memory, self._contract = store, memory, contract
        self._table, *keys = store.keys.take(1 + len(memory.chunks))
        half = [store.compression is not None and not exact for exact in memory.exact]
        # What holds the vector, and what exchanges with it: one and the same for plain sums.
        self._center = self._steps = Route(
            store.kv, memory, keys, half if store.sync else [False] * len(half)
        )
        if store.has_steps:
            kinds = [PLAIN if exact else STEP for exact in memory.exact]
            steps = [store.keys.of_kind(kind, key) for kind, key in zip(kinds, keys)]
            self._steps = Route(store.kv, memory, steps, half)
        self._init()

    def _init(self) -> None:
        """Make the keys, of zeros; waits for all clients."""
        routes = [self._center] if self._steps is self._center else [self._center, self._steps]
        table = mx.nd.zeros(contracts.table_shape(self._store.num_clients))
        self._store.kv.init(
            [self._table, *(key for route in routes for key in route.keys)],
            [table, *(zeros for route in routes for zeros in route.zeros())],
        )

    def pull(self) -> None:
        """Fetch the center."""
        self._pull_center()

    def _pull_center(self) -> int:
        self._memory.set_stage(0, IDLE)  # the last difference is overwritten
        return self._pull(self._center)

    def _pull(self, route: Route) -> int:
        memory = self._memory
        target = 1 - max(memory.whole, 0) if route.buffer is None else route.buffer
        if target == memory.whole:  # keep this center whole until the next one is
            np.copyto(memory.buffers[1 - target], memory.buffers[target])
            memory.set_center(memory.version, 1 - target)
        route.pull(target)
        if route is not self._center and not is_finite(memory.buffers[target]):
            return self._pull(self._center)  # half floats do not hold this center
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

    def exchange(self, rule: str, alpha: float, serial: int) -> None:
        """Exchange x with the center by `rule`; return when the servers have acknowledged.

        `serial` is the exchange's number, under which the memory says how far it is.
        """
        memory = self._memory
        spans = kind_spans(memory.sizes.tolist(), memory.kinds.tolist())
        if rule == "esgd":
            memory.set_stage(serial, PULLING)
            c = memory.buffers[self._pull(self._steps)]
            waiting = self._push_difference(rule, alpha, c, spans, serial)
            self._measure(c, spans, pushed=bool(waiting))
            self._steps.settle(waiting)
            memory.set_stage(serial, ACKNOWLEDGED)
        else:
            waiting = self._push_difference(rule, alpha, memory.base, spans, serial)
            self._steps.settle(waiting)
            memory.set_stage(serial, ACKNOWLEDGED)
            c = memory.buffers[self._pull(self._steps)]
            self._measure(c, spans, pushed=bool(waiting))
            for kind, start, stop in spans:
                if kind != CARRIED:  # what is frozen here counts from where it was frozen
                    memory.base[start:stop] = c[start:stop]

    def _push_difference(
        self, rule: str, alpha: float, center: np.ndarray, spans: Sequence[Span], serial: int
    ) -> List[Any]:
        free = 1 - self._memory.whole
        x, out = self._memory.x, self._memory.buffers[free]
        center_difference(rule, alpha, x, center, spans, out)
        self._steps.round(free)  # the client takes away what the servers add
        if not is_finite(out):
            out[:] = 0  # the center takes nothing from weights that are lost
            return []
        self._memory.set_stage(serial, PUSHING)
        return self._steps.push(free)

    def _measure(self, center: np.ndarray, spans: Sequence[Span], pushed: bool) -> None:
        distance = distance_to(center, self._memory.x, spans)
        self._memory.distance = distance if pushed else float("inf")

    def seed(self, seeder: bool) -> None:
        """Make the seeder's x the center, once the clients' contracts are found equal.

        All clients call it. It may be called again: the center is then replaced.

        Raises
        ------
        ValueError
            On all clients, naming what differs between them.
        """
        row = contracts.row(self._contract, seeder)
        table = self._store.add_up(self._table, row)
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
        self._push(self._center, free)
        self._pull_center()

    def _seed_by_difference(self, seeder: bool) -> None:
        if seeder:
            self.fill()  # all other agents wait in `pull_together`: nobody moves the center
        self.pull_together()
        self.rebase()

    def fill(self) -> None:
        """Make x the center; nobody else may move it meanwhile."""
        self._set_center()
        self._step_of_nothing()

    def restore(self) -> None:
        """Put the last whole center on servers that hold zeros: it is that of other servers."""
        self._push(self._center, self._memory.whole)
        self._step_of_nothing()

    def _push(self, route: Route, buffer: int) -> None:
        route.settle(route.push(buffer))

    def _set_center(self) -> None:
        """Push what is missing from the center to x, until nothing is: rounding may leave some."""
        memory = self._memory
        for correction in range(_CORRECTIONS):
            c = memory.buffers[self._pull_center()]
            from_zeros, free = not c.any(), 1 - memory.whole
            difference = weight_change(memory.x, c, out=memory.buffers[free])
            if correction and not difference.any():
                return
            self._push(self._center, free)
            if from_zeros:
                return

    def _step_of_nothing(self) -> None:
        """Let the keys of exchanges, where they are others, answer with the center that was set."""
        if self._steps is not self._center:
            free = 1 - self._memory.whole
            self._memory.set_stage(0, IDLE)
            self._memory.buffers[free][:] = 0
            self._push(self._steps, free)

    def start_reduce(
        self, rounds: RoundsInFlight, first: int, last: int, answer: Callable[[], None]
    ) -> None:
        """Start to sum chunks ``[first, last)`` of x over all clients, in place.

        All clients call it, in one order. `answer` is called when x holds the sums.
        """
        rounds.start(self._center, first, last, answer)
