"""A client's side of the center: snapshot, exchange in the background, application.

Every rank pushes the same operations at the same steps; the leader alone talks
to its agent, and what came of it reaches the other ranks by broadcast inside
the engine, so replicas stay equal to the bit and ``step()`` does not wait.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Callable, Optional, Tuple

import mxnet as mx
import numpy as np

from .center import Box, ExchangeLost, Link, Mailbox, chunks_of
from .center.given_up import close_with
from .collectives import allreduce, plan
from .counters import Counters
from .engine import Lane, view, wait_to_write
from .errors import CenterError
from .optim import largest_alpha
from .parameters import Weights, take_from_leader
from .policy import Interval, Policy
from .states import Array, Position
from .topology import World

__all__ = ["CenterExchange"]

_log = logging.getLogger(__name__)

_LATE, _DONE, _FAILED, _SKIPPED, _LOST = range(5)

_ATTEMPTS = 3  # at the last exchange, which may meet a hand-over


class CenterExchange:
    """The exchanges of one trainer of a client with the center.

    Parameters
    ----------
    world : World
    lane : Lane
    link : Link or None
        The leader's; None on other ranks.
    name : str
        Prefix of this trainer's keys, the same on all clients.
    policy : Policy
    counters : Counters
    """

    def __init__(
        self,
        world: World,
        lane: Lane,
        link: Optional[Link],
        name: str,
        policy: Policy,
        counters: Counters,
    ) -> None:
        self._world, self._lane, self._link, self._name = world, lane, link, name
        self._policy, self._interval = policy, Interval(policy.interval)
        self._counters = counters
        self._mailbox: Optional[Box] = None
        self._apply_at: Optional[int] = None
        self._step = self._taken_at = 0  # the last one made, and that of the leader's last snapshot
        self._status = _DONE  # of the last application; set in the engine, read after a wait
        self._skipped = self._told_skip = self._joined = False
        self._clients = world.num_clients
        self._seen_at = 0.0
        self._failure: Optional[Exception] = None
        self._started = False
        self._resumed: Optional[Position] = None

    def start(self, weights: Weights, contract: dict) -> bool:
        """Bring the center and this client together; collective in the job, waits.

        The center is seeded with client 0's weights and put into the network
        of every other client. A client that resumes keeps its own weights, and where that
        is client 0 the center is the one that it had. But a client that comes back to a job takes
        the center that is there, and moves nothing.

        Returns
        -------
        bool
            Whether the client's weights were replaced.

        Raises
        ------
        CenterError
            On all ranks of the client.
        ValueError
            On all ranks of the client: it resumes with a center of another size.
        """
        resumed = self._resumed
        if resumed is not None and resumed.center is not None:
            _check_size(resumed.center.host.size, weights.size)
        self._weights = weights
        self._flat = weights.flat()
        self._host = view(self._flat)[: weights.size]
        self._lane.wait()
        self._spread = plan("broadcast", self._host, self._world.comm, what="exchanges")
        self._world.on_leader(lambda: self._seed(contract, resumed), self._what("the start"))
        joined = self._world.broadcast(self._joined)
        self._started, self._resumed = True, None
        if resumed is not None and not joined:
            return False
        return take_from_leader(self._world, weights, self._flat)

    def _what(self, doing: str) -> str:
        """How messages call a wait for the center."""
        return f"{doing} of '{self._name}', step {self._step}"

    def _seed(self, contract: dict, resumed: Optional[Position]) -> None:
        assert self._link is not None
        self._link.wait_ready()
        weights = self._weights
        if self._mailbox is None:
            # Running statistics are averaged as they are: no momentum, nothing half floats lack.
            parts = [(weights.num_moved, False), (weights.size - weights.num_moved, True)]
            chunks, exact = chunks_of(parts, self._link.num_servers)
            self._mailbox = self._link.attach(self._name, weights.sizes, chunks, contract, exact)
            close_with(self, self._mailbox)
        center = base = self._host.copy()
        if resumed is not None:
            center = center if resumed.center is None else resumed.center.host
            base = base if resumed.base is None else resumed.base.host
        self._mailbox.x[:] = center
        saved = resumed is not None and resumed.center is not None
        self._joined = self._mailbox.seed(self._world.client == 0, self._host, saved)
        if self._joined:
            _log.info("client %d takes the center's weights as they are", self._world.client)
        elif resumed is not None and self._policy.rule == "asgd":
            assert isinstance(self._mailbox, Mailbox)  # it needs servers
            self._mailbox.count_from(base)

    def resume(self, position: Position, own: bool) -> None:
        """Go on at `position` from the next `start`; collective in the client, waits.

        What is in flight is dropped. Unless the position is this client's `own`, it takes the
        center like a new client.
        """
        if self._started:
            self.flush(drop=True)
        self._started, self._interval.last = False, position.last_due
        self._step = position.step
        self._resumed = position if own else None

    def after_update(self, step: int) -> None:
        """Apply what is back and start what is due after update `step`; pushes, does not wait."""
        due, self._step = self._interval.due(step), step
        if self._apply_at is not None and (due or step >= self._apply_at):
            self._push_application()
        if not due:
            return
        self._push_snapshot()
        self._apply_at = step + self._policy.lazy
        if self._policy.lazy == 0:
            self._push_application()

    def _push_snapshot(self, wait_s: float = 0.0) -> None:
        self._weights.copy_to(self._flat)
        self._kinds = kinds = self._weights.kinds()
        what = self._what("the exchange")
        start = functools.partial(self._start, kinds, wait_s, what, self._step)
        self._lane.push(self._timed(start), "center snapshot", writes=[self._flat])

    def _timed(self, work: Callable[[], None]) -> Callable[[], None]:
        """Count what `work` takes in the engine as time in the center."""

        def timed() -> None:
            began = time.perf_counter()
            try:
                work()
            finally:
                self._counters.center_s += time.perf_counter() - began

        return timed

    def _start(self, kinds: np.ndarray, wait_s: float, what: str, step: int) -> None:
        """In the engine: average the running statistics, hand the snapshot to the agent.

        Where servers are just being replaced it waits for them for `wait_s`.
        """
        statistics = self._host[self._weights.num_moved :]
        if self._world.size > 1 and statistics.size:
            means = f"the mean of running statistics in {what}"
            allreduce(statistics, self._world.comm, op="mean", what=means)
        if self._mailbox is None or self._mailbox.in_flight:
            return  # not the leader, or one is late: that one is collected next
        self._mailbox.x[:] = self._host
        self._taken_at = step
        try:
            with self._world.reported(what):  # in a split world it waits
                self._skipped = not self._mailbox.start_exchange(
                    self._policy.rule, self._alpha(), kinds, wait_s
                )
        except Exception as error:
            self._failure = error  # said to all ranks where they expect the exchange

    def _alpha(self) -> float:
        """The moving rate for as many clients as the job has now."""
        assert self._link is not None
        clients, alpha = self._link.num_clients, self._policy.alpha_for(self._link.num_clients)
        if clients != self._clients and self._policy.rule == "esgd":
            self._clients, bound = clients, largest_alpha(clients)
            _log.log(
                logging.WARNING if alpha > bound else logging.INFO,
                "client %d: alpha is %.4g for the %d clients that there are now, of at most %.4g "
                "at which exchanges are stable",
                self._world.client, alpha, clients, bound,
            )  # fmt: skip
        return alpha

    def _push_application(self, limit_s: Optional[float] = None, drop: bool = False) -> None:
        self._apply_at = None
        what = self._what("the application of an exchange")
        collect = functools.partial(self._collect, limit_s, what, self._step)
        self._lane.push(self._timed(collect), "center application", writes=[self._flat])
        if not drop:
            self._weights.add(self._flat, self._kinds)

    def _collect(self, limit_s: Optional[float], what: str, step: int) -> None:
        """In the engine: the leader's exchange, if it is back, into `_flat` on every rank.

        Unless `limit_s` is given a step waits for it once, and no more when it was late.
        """
        if limit_s is None:
            limit_s = 0.0 if self._late else self._world.settings.center_wait_s
        status, text = np.array([_LATE]), ""
        if self._mailbox is not None:
            with self._world.reported(what):
                status[0], text = self._fetch(self._mailbox, limit_s)
        comm = self._world.comm
        comm.broadcast(status, what)
        if status[0] == _FAILED:
            raise CenterError(comm.allgather(text, "the error of an exchange")[0])
        self._status = int(status[0])
        if self._status != _DONE:
            self._host[:] = 0
            self._counters.exchanges_late += self._status == _LATE
            self._counters.exchanges_skipped += self._status == _SKIPPED
            self._counters.exchanges_lost += self._status == _LOST
            return
        self._spread("the broadcast of an exchange")
        self._counters.exchanges += 1
        self._seen_at = time.monotonic()
        if self._mailbox is not None:
            self._counters.distance = distance = self._mailbox.distance
            if not np.isfinite(distance):
                half = self._policy.compression is not None and self._world.leaders is None
                _log.warning(
                    "client %d: weights that are not finite%s did not reach the center",
                    self._world.client,
                    ", or further from it than half floats reach," if half else "",
                )
            self._counters.server_bytes = self._mailbox.bytes_moved
            self._counters.staleness = step - self._taken_at

    def _fetch(self, mailbox: Box, limit_s: float) -> Tuple[int, str]:
        """On the leader: what became of the exchange; its shift into `_host`."""
        try:
            if self._failure is not None:
                raise self._failure
            if self._skipped:
                self._tell_skip()
                return _SKIPPED, ""
            if not mailbox.collect(self._host, limit_s):
                return _LATE, ""
            self._told_skip = False
            return _DONE, ""
        except ExchangeLost as error:
            _log.warning("%s", error)
            return _LOST, ""
        except Exception as error:
            return _FAILED, str(error)

    def _tell_skip(self) -> None:
        if not self._told_skip:
            self._told_skip = True
            _log.warning(
                "client %d: the servers are being replaced; it trains on, and exchanges that are "
                "due meanwhile are skipped",
                self._world.client,
            )

    @property
    def _late(self) -> bool:
        return self._status == _LATE

    def flush(self, drop: bool = False) -> None:
        """Complete the exchange in flight, if there is one; collective in the client, waits.

        With `drop` its shift is not applied: the weights it belongs to were replaced.
        """
        wait_to_write(self._flat)
        if self._apply_at is not None or self._late:
            self._push_application(self._world.settings.center_limit_s, drop)
        self._settle()

    def _settle(self) -> None:
        self._lane.wait()
        wait_to_write(self._flat)

    def position(self, step: int) -> Position:
        """Complete what is in flight and say where this client stands; collective, waits.

        The center is only on the leader. Where servers are being replaced it is the last one seen.
        """
        if not self._started:
            return self._resumed or Position(step, self._interval.last)
        self.flush()
        limit_s = self._world.settings.center_wait_s
        self._world.on_leader(lambda: self._pull(False, limit_s), self._what("the center"))
        position = Position(step, self._interval.last)
        if self._mailbox is not None:
            position.center = Array(self._host.copy(), "numpy")
            if self._policy.rule == "asgd":
                assert isinstance(self._mailbox, Mailbox)
                position.base = Array(self._mailbox.base, "numpy")
        return position

    def exchange_now(self) -> None:
        """Complete the one in flight and make a whole further exchange; waits.

        It waits for servers that are being replaced, `center_limit_s` at most.
        """
        self.flush()
        # In a split world a client that still trains learns here that this one has come to its end.
        self._world.meet_clients(f"the last exchange of '{self._name}'")
        limit_s = self._world.settings.center_limit_s
        for _ in range(_ATTEMPTS):
            self._push_snapshot(limit_s)
            self._push_application(limit_s)
            self._settle()
            if self._status != _LOST:
                break
        if self._status in (_LOST, _SKIPPED) and self._mailbox is not None:
            _log.warning(
                "client %d: its last exchange did not take place: no servers within %g s",
                self._world.client, limit_s,
            )  # fmt: skip

    def pull(self, sync: bool) -> mx.nd.NDArray:
        """Return the center, flat in the order of `Weights`; completes what is in flight.

        Parameters
        ----------
        sync : bool
            All clients of the job get the same version; collective in the job.
        """
        self.flush()
        self._world.on_leader(lambda: self._pull(sync), self._what(f"the center (sync={sync})"))
        self._world.control.broadcast(self._host, "the broadcast of the center")
        return self._flat.copy()

    def _pull(self, sync: bool, limit_s: Optional[float] = None) -> None:
        assert self._mailbox is not None
        try:
            self._mailbox.pull(self._host, sync=sync, limit_s=limit_s)
        except CenterError as error:
            if sync or not self._mailbox.last_center(self._host):
                raise
            age_s = time.monotonic() - self._seen_at
            _log.warning("the center is that of %.0f s ago, the last one seen: %s", age_s, error)
        else:
            self._seen_at = time.monotonic()

    def reset(self) -> None:
        """Set the center, and all clients, to client 0's weights; collective in the job, waits."""
        self.flush(drop=True)
        self._world.on_leader(self._seed_again, self._what("reset_center()"))
        take_from_leader(self._world, self._weights, self._flat)

    def _seed_again(self) -> None:
        assert self._mailbox is not None
        self._mailbox.x[:] = view(self._weights.flat())[: self._weights.size]
        self._mailbox.seed(self._world.client == 0, self._host)


def _check_size(found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(
            f"the states that were loaded hold a center of {found} floats, but the network has "
            f"{wanted}: load those that were saved with this network"
        )
