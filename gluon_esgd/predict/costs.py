"""What each piece of communication takes by itself: messages, bytes over rates, adding up.

Each formula is the latency-bandwidth model of collectives (Thakur, Rabenseifner, Gropp,
*Optimization of collective communication operations in MPICH*, 2005): messages times latency, and
bytes over the rate of the busiest link. What of it is hidden is the matter of `prediction`.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, Tuple

from .cluster import Cluster
from .configuration import STOCK, Configuration
from .traffic import Zone, layout_of
from .work import Work

__all__ = ["Costs", "mixed"]

_HALF = 0.5  # bytes of a half float to those of a float
_ROUNDING_S = 0.42e-9  # a byte of float32 to half and back, on one core (docs/collectives.md)
_PIECE_BYTES = 4 << 20  # in which a broadcast travels
_STOCK_PIECES = 20  # keys that hold most of a model; the stock rules send each when it is there


def mixed(share: float, at_once_s: float, in_order_s: float) -> float:
    """Return what work takes of which a share is done at once, and the rest in order."""
    return share * at_once_s + (1 - share) * in_order_s


class Costs:
    """The costs of a configuration; B is the bytes of all parameters, N what a ring has members.

    Attributes
    ----------
    memory_s : float
        Of the allreduce in a host of n ranks of a client: n B are read, n B written.
    ring_s : float
        Between the hosts of a client: ``2 (N - 1) / N B`` over the rate, clients that share a
        host share its link (`traffic`). With half floats B / 2, and the rounding.
    ring_latency_s : float
        ``2 (N - 1)`` messages for each bucket.
    allreduce_s : float
        The three of them, one after the other.
    one_way_s : float
        Every client pushes, or pulls, once: of all links the longest time, clients x B / servers
        on that of a server, B on that of a leader, less what stays on a host.
    both_ways_s : float
        The same with pushes and pulls at once.
    together_s : float
        Of all links the longest time of a step's rings, pushes, pulls and broadcasts, at once.
    add_s : float
        Each server takes in clients x B / servers.
    agent_s : float
        An agent makes the difference of B.
    peers_s : float
        An allreduce over the leaders of p clients: a ring, as above.
    spread_s : float
        A client's leader broadcasts B to the other hosts: scatter and ring, 2 (N - 1) / N B.
    turn_s : float
        What does not depend on bytes, of an exchange or of the round of a bucket: two round trips
        (``2 (p - 1)`` messages without servers) and a fixed cost.
    """

    def __init__(self, work: Work, cluster: Cluster, configuration: Configuration) -> None:
        self._cluster, self._layout = cluster, layout_of(cluster, configuration)
        self._workers, self._clients, self._servers, _ = configuration.counts
        self._rule = configuration.rule
        self._bytes = work.parameter_bytes
        self._sent = self._bytes * (_HALF if configuration.half_floats else 1.0)
        meets = self._rule == "sgd" and self._clients > 1
        bucket_bytes = configuration.bucket_bytes / (2 if meets else 1)
        buckets = max(1, math.ceil(self._bytes / bucket_bytes))
        self.pieces = _STOCK_PIECES if self._rule in STOCK else buckets
        self._inside(configuration.half_floats)
        self._between()

    def _inside(self, half_floats: bool) -> None:
        constants, layout = self._cluster.constants, self._layout
        self.memory_s = 2 * layout.local_ranks * self._bytes / constants.memory_bytes_per_s
        self.ring_s = self._longest(lambda zone: zone.ring) * self._sent
        if half_floats and layout.ring_members > 1:
            share = 2 * (layout.ring_members - 1) / layout.ring_members
            self.memory_s += share * self._bytes * _ROUNDING_S / layout.parallel
        self.ring_latency_s = self.pieces * 2 * (layout.ring_members - 1) * constants.latency_s
        self.allreduce_s = self.memory_s + self.ring_s + self.ring_latency_s
        hosts = layout.client_hosts
        messages = math.ceil(self._bytes / _PIECE_BYTES) * (hosts - 1 + math.ceil(math.log2(hosts)))
        spread = self._longest(lambda zone: max(zone.spread_out, zone.spread_in))
        self.spread_s = spread * self._bytes + messages * constants.latency_s

    def _between(self) -> None:
        constants, clients = self._cluster.constants, self._clients
        self.one_way_s = self._longest(lambda zone: max(zone.push_out, zone.push_in)) * self._sent
        self.both_ways_s = self._longest(lambda zone: zone.push_out + zone.push_in) * self._sent
        self.together_s = self._longest(
            lambda zone: (
                (zone.ring + zone.push_out + zone.push_in) * self._sent
                + max(zone.spread_out, zone.spread_in) * self._bytes
            )
        )
        self.peers_s = self._longest(lambda zone: zone.peers) * self._sent
        self.add_s = self.agent_s = 0.0
        messages = 2 * (self._layout.peer_members - 1)
        if self._servers:
            messages = 4
            self.add_s = clients * self._sent / self._servers / constants.server_bytes_per_s
            self.agent_s = self._bytes / constants.agent_bytes_per_s
        self.turn_s = messages * constants.latency_s + constants.exchange_s

    @property
    def snapshot_s(self) -> float:
        """Of a step in which an exchange is due: a copy of the weights, a shift added to them.

        Six times a rank's vector in the memory of its host, whether the exchange is late or not.
        """
        ranks = self._cluster.workers_per_host if self._cluster.cores is None else self._workers
        return 6 * self._bytes * ranks / self._cluster.constants.memory_bytes_per_s

    @property
    def exchange_wire_s(self) -> float:
        """Of push and pull of all clients; of one client they follow each other.

        Other clients push while it pulls, as far as `Constants.duplex` says.
        """
        rate, duplex = self._cluster.rate, self._cluster.constants.duplex
        lone_s = self._sent / rate("host")
        if self._servers:
            lone_s = max(lone_s, self._sent / self._servers / rate("server host"))
        at_once_s = max(self.both_ways_s, 2 * min(lone_s, self.one_way_s))
        return mixed(duplex, at_once_s, 2 * self.one_way_s)

    def _longest(self, load: Callable[[Zone], float]) -> float:
        """Seconds that the slowest link takes for its `load` in bytes, or of a vector of one."""
        rate = self._cluster.rate
        return max((load(zone) / rate(zone.kind) for zone in self._layout.zones), default=0.0)

    @property
    def ring_beside_servers_s(self) -> float:
        """Of the links that exchanges use, the longest time of a step's rings."""
        used = self._longest(lambda zone: zone.ring if zone.push_out + zone.push_in else 0.0)
        return used * self._sent

    def cores_s(self, meetings: float) -> float:
        """Return the time of cores in a step that has so many exchanges or rounds, per core.

        Moving bytes through sockets, adding on servers, differences in agents; 0 unless the hosts
        share the cores of one machine (`Cluster.cores`).
        """
        if self._cluster.cores is None:
            return 0.0
        constants, layout = self._cluster.constants, self._layout
        moved = layout.ring_total * self._sent + meetings * layout.spread_total * self._bytes
        own = 0.0
        if self._servers:
            moved += meetings * 2 * self._clients * self._sent
            own += meetings * self.add_s * self._servers
        if self._servers and self._rule in ("asgd", "esgd"):
            own += meetings * self.agent_s * self._clients
        if not self._servers and self._clients > 1:
            moved += meetings * 2 * (self._clients - 1) * self._sent
        return (own + moved / constants.socket_bytes_per_s) / self._cluster.cores

    def busiest(self, meetings: float) -> Tuple[str, str, float]:
        """Return name, direction and bytes in a step of the link that is busy longest."""
        found, longest_s = ("", "", 0.0), 0.0
        for zone in self._layout.zones:
            both = zone.ring + meetings * (zone.push_out + zone.push_in + zone.peers)
            into = both * self._sent + meetings * zone.spread_in * self._bytes
            out = both * self._sent + meetings * zone.spread_out * self._bytes
            busy_s = max(into, out) / self._cluster.rate(zone.kind)
            if busy_s > longest_s * (1 + 1e-9):
                alike = math.isclose(into, out, rel_tol=1e-6)
                direction = "each way" if alike else "in" if into > out else "out"
                found = f"{zone.kind} {zone.number}", direction, max(into, out)
                longest_s = busy_s
        return found

    def busy_s(self, compute_s: float, meetings: float) -> Dict[str, float]:
        """Return for each resource the seconds that it is busy in a step, hidden or not."""
        agent_s = self.agent_s if self._rule in ("asgd", "esgd") else 0.0
        link, between_s = self._link_between()
        turns = self.pieces if self._rule == "sgd" else 1
        latency_s = self.ring_latency_s + meetings * turns * self.turn_s
        return {
            "compute": compute_s + self.cores_s(meetings),
            "memory": self.memory_s,
            "wire inside clients": self.ring_s + meetings * self.spread_s,
            link: meetings * between_s,
            "servers' adding": meetings * self.add_s,
            "agents": meetings * agent_s,
            "latency": latency_s + self._cluster.constants.overhead_s,
        }

    def _link_between(self) -> Tuple[str, float]:
        """Whose link between clients is the narrow one, and how long a meeting keeps it busy."""
        if not self._servers:
            return "wire between leaders", self.peers_s
        rate = self._cluster.rate
        narrow = max(self._layout.zones, key=lambda z: max(z.push_out, z.push_in) / rate(z.kind))
        whose = "servers' link" if narrow.push_in >= narrow.push_out else "leaders' links"
        return whose, 2 * self.one_way_s
