"""Rule ``sgd`` between clients: gradients are summed over all of them in every step."""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Sequence, Tuple
from weakref import finalize

import mxnet as mx
import numpy as np

from .center import Box, Link, chunks_of
from .center.given_up import close_with
from .collectives import TAIL, allreduce
from .engine import view
from .parameters import Weights, take_from_leader
from .topology import World

__all__ = ["ClientRounds"]

_LARGEST = 1 << 18  # floats of a chunk: one comes back while others go, so several make a bucket
_WORD = 16  # bytes of a client's learning rate and weight decay, each in a float


class ClientRounds:
    """The synchronous rounds of one trainer over all clients of the job.

    Parameters
    ----------
    world : World
    link : Link or None
        The leader's; None on other ranks, and with one client.
    name : str
        Prefix of this trainer's keys, the same on all clients.
    """

    def __init__(self, world: World, link: Optional[Link], name: str) -> None:
        self._world, self._link, self._name = world, link, name
        self.num_clients = world.num_clients
        self._spans: List[Tuple[int, int]] = []
        self._under_way: Dict[int, Callable[[], None]] = {}
        self._gradients: Optional[Box] = None
        self._weights: Optional[Box] = None
        self._laid = self._closed_bytes = 0
        self._closing: Optional[finalize] = None  # of `_gradients`, when this object is gone

    def start(self, weights: Weights, contract: Dict[str, int]) -> bool:
        """Give every client the weights of client 0; collective in the job, waits.

        Parameters
        ----------
        weights : Weights
        contract : dict of str to int
            What all clients must have alike.

        Returns
        -------
        bool
            Whether this client's weights were replaced.
        """
        what = f"the start of '{self._name}'"
        self._world.on_leader(lambda: self._open(weights, contract), what)
        return self.seed(weights)

    def _open(self, weights: Weights, contract: Dict[str, int]) -> None:
        if self._weights is not None:
            return  # it starts again, with states that were loaded
        assert self._link is not None
        self._link.wait_ready()
        parts = [(weights.num_moved, True), (weights.size - weights.num_moved, True)]
        chunks, exact = chunks_of(parts, self._link.num_servers)
        self._weights = self._link.attach(
            f"{self._name}.weights", weights.sizes, chunks, contract, exact
        )
        close_with(self, self._weights)

    def seed(self, weights: Weights) -> bool:
        """Give every client the weights of client 0, again; collective in the job, waits.

        Returns
        -------
        bool
            Whether this rank's weights were replaced.
        """
        flat = weights.flat()
        host = view(flat)[: weights.size]
        self._world.on_leader(lambda: self._seed(host), f"the seed of '{self._name}'")
        return take_from_leader(self._world, weights, flat)

    def _seed(self, host: np.ndarray) -> None:
        assert self._weights is not None
        self._weights.x[:] = host
        self._weights.seed(self._world.client == 0, host)

    def lay(self, buckets: Sequence[int]) -> None:
        """Make place for gradient buckets of these sizes; all leaders call it, waits.

        Called again when the set of parameters that have gradients has changed.
        """
        assert self._link is not None
        if self._gradients is not None and self._closing is not None:
            self._closed_bytes += self._gradients.bytes_moved
            self._gradients.close()
            self._closing.detach()
        words = self.num_clients * _WORD  # behind the buckets, see `gather`
        ends = np.cumsum([*buckets, words]).tolist()
        self._spans = [(end - n, end) for n, end in zip([*buckets, words], ends)]
        self._laid += 1
        parts = [(n, True) for n in buckets]
        if self._link.compression is not None:  # half floats do not hold counts of samples
            parts = [part for n in buckets for part in ((n - TAIL, False), (TAIL, True))]
        chunks, exact = chunks_of([*parts, (words, True)], self._link.num_servers, _LARGEST)
        self._gradients = self._link.attach(
            f"{self._name}.gradients{self._laid}", [*buckets, words], chunks, {}, exact
        )
        self._closing = close_with(self, self._gradients)

    def start_sum(self, number: int, buffer: np.ndarray, what: str) -> None:
        """Start to sum bucket `number`, `what` in messages, over all clients; leaders only."""
        assert self._gradients is not None
        start, stop = self._spans[number]
        self._gradients.x[start:stop] = buffer
        with self._world.reported(what):
            self._under_way[number] = self._gradients.start_reduce(start, stop)

    def finish_sum(self, number: int, buffer: np.ndarray, what: str) -> None:
        """Put into `buffer` the sum that was started; leaders only, waits."""
        assert self._gradients is not None
        start, stop = self._spans[number]
        with self._world.reported(what):
            self._under_way.pop(number)()
        buffer[:] = self._gradients.x[start:stop]

    def gather(self, rates: Sequence[float]) -> List[List[float]]:
        """Return the two `rates` of each client, exactly; leaders only, waits.

        Each client writes the bytes of its own where the others have zeros, and all are summed.
        """
        assert self._gradients is not None
        start, stop = self._spans[-1]
        words = self._gradients.x[start:stop]
        words[:] = 0
        own = self._world.client * _WORD
        words[own : own + _WORD] = np.array(rates, np.float64).view(np.uint8)
        self._gradients.reduce(start, stop)
        by_client = words.astype(np.uint8).view(np.float64).reshape(self.num_clients, 2)
        return [[float(rate) for rate in rates] for rates in by_client]

    def mean_statistics(self, weights: Weights) -> mx.nd.NDArray:
        """Return this client's weights, flat, with running statistics meaned over the job.

        Collective in the client, and with several clients in the job; waits.
        """
        flat = weights.flat()
        statistics = view(flat)[weights.num_moved : weights.size]
        if not statistics.size:
            return flat
        allreduce(statistics, self._world.control, what="the mean of running statistics")
        if self._world.num_clients > 1:
            self._world.on_leader(
                lambda: self._sum_clients(statistics, weights.num_moved),
                "the sum of running statistics over clients",
            )
            self._world.control.broadcast(statistics, "the broadcast of running statistics")
        np.divide(statistics, np.float32(self._world.num_workers), out=statistics)
        return flat

    def _sum_clients(self, statistics: np.ndarray, start: int) -> None:
        assert self._weights is not None
        self._weights.x[start:] = statistics
        self._weights.reduce(start, start + statistics.size)
        statistics[:] = self._weights.x[start:]

    @property
    def server_bytes(self) -> int:
        """Bytes of this trainer that went to and from the servers (leader only)."""
        mailboxes = [m for m in (self._weights, self._gradients) if m is not None]
        return self._closed_bytes + sum(m.bytes_moved for m in mailboxes)
