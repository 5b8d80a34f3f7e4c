"""Which link carries how much, in units of the bytes of all parameters.

Links are those of *zones*: a host, a rack, a host of servers. What stays inside a zone does not
cross its link. Loads do not depend on rates, so one layout serves many predictions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from .cluster import Cluster
from .configuration import Configuration

__all__ = ["Layout", "Zone", "layout_of", "ring_share"]


class Zone(NamedTuple):
    """The loads of a link; of zones that are alike only the first is kept.

    Attributes
    ----------
    kind : {'host', 'rack', 'server host'}
    number : int
        Of the first such zone.
    ring : float
        Of the allreduce inside clients, in a step, each way.
    push_out, push_in : float
        When every client pushes once; a pull is the same the other way round.
    peers : float
        Of an allreduce over the leaders, where there are no servers, each way.
    spread_out, spread_in : float
        Of the broadcasts inside clients of what came from others.
    """

    kind: str
    number: int
    ring: float
    push_out: float
    push_in: float
    peers: float
    spread_out: float
    spread_in: float


@dataclass(frozen=True)
class Layout:
    """Where the job's processes are, as far as costs depend on it.

    Attributes
    ----------
    zones : tuple of Zone
    ring_members : int
        Of the longest ring inside a client; 1 where no client leaves its host.
    peer_members : int
        Of the ring of leaders.
    client_hosts : int
        Hosts of the client that has most.
    local_ranks : int
        Ranks of a host that add up gradients with others there, at most.
    parallel : int
        Rings that run at once through a host of a client, at least.
    ring_total, spread_total : float
        Loads of all hosts together, of what they receive.
    """

    zones: Tuple[Zone, ...]
    ring_members: int
    peer_members: int
    client_hosts: int
    local_ranks: int
    parallel: int
    ring_total: float
    spread_total: float


class _Places(NamedTuple):
    """Of a cluster, what says where processes are."""

    hosts: int
    per_host: int
    per_rack: Optional[int]
    server_hosts: int

    def rack(self, host: int) -> int:
        """Return the rack of a host; without racks all are in one, which is not looked at."""
        return host // (self.per_rack or self.hosts)


def layout_of(cluster: Cluster, configuration: Configuration) -> Layout:
    """Return the loads of all links.

    Raises
    ------
    ValueError
        The cluster has no place for so many workers.
    """
    workers, clients, servers, _ = configuration.counts
    room = cluster.hosts * cluster.workers_per_host
    if workers > room:
        raise ValueError(
            f"workers {workers} must be at most {room}, the {cluster.workers_per_host} of each of "
            f"{cluster.hosts} hosts: give more hosts or more workers per host"
        )
    places = _Places(
        cluster.hosts, cluster.workers_per_host, cluster.hosts_per_rack, cluster.server_hosts
    )
    return _layout(places, workers, clients, servers)


def ring_share(counts: Sequence[int]) -> Tuple[int, float]:
    """Return the members of the ring over hosts with `counts` ranks, and what each host sends.

    `hierarchical` has a ring of hosts where each has several ranks, `ring` one of all ranks
    (`collectives.choice.default`). A ring of n sends ``2 (n - 1) / n`` of the vector, the least
    possible: Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of
    workstations*, 2009.
    """
    members = len(counts) if min(counts) > 1 else sum(counts)
    return members, 2 * (members - 1) / members


@dataclass
class _Loads:
    """The loads of the zones of one kind, by their numbers."""

    ring: Dict[int, float] = field(default_factory=lambda: defaultdict(float))
    spread_out: Dict[int, float] = field(default_factory=lambda: defaultdict(float))
    spread_in: Dict[int, float] = field(default_factory=lambda: defaultdict(float))
    leaders: Dict[int, int] = field(default_factory=lambda: defaultdict(int))
    servers: Dict[int, int] = field(default_factory=lambda: defaultdict(int))
    ring_total: float = 0.0
    spread_total: float = 0.0

    def add_client(self, zones: range, ring: float, hosts: int) -> None:
        """Add a client of so many `hosts` in these zones; its leader is in the first one.

        Servers come before. Zones between the first and the last have no other client: of those
        without servers one stands for all.
        """
        self.leaders[zones.start] += 1
        if len(zones) == 1:
            return
        # Long vectors are scattered, then gathered around a ring: MPI's usual broadcast.
        gathered = (hosts - 1) / hosts
        self.ring_total += ring * len(zones)
        self.spread_total += gathered + len(zones) - 1
        inner = zones[1:-1]
        with_servers = max(0, len(self.servers) - inner.start)
        for zone in (zones[0], *inner[: with_servers + 1], zones[-1]):
            self.ring[zone] += ring
            self.spread_in[zone] += gathered if zone == zones.start else 1.0
            self.spread_out[zone] += 2 * gathered if zone == zones.start else gathered

    def zones(self, kind: str, clients: int, servers: int, peers: float) -> Iterator[Zone]:
        """Make a zone of each number."""
        for number in sorted({*self.ring, *self.leaders, *self.servers}):
            leaders = self.leaders.get(number, 0)
            share = self.servers.get(number, 0) / max(1, servers)
            yield Zone(
                kind,
                number,
                self.ring.get(number, 0.0),
                leaders * (1 - share) if servers else 0.0,
                (clients - leaders) * share,
                peers if 0 < leaders < clients else 0.0,
                self.spread_out.get(number, 0.0),
                self.spread_in.get(number, 0.0),
            )


@lru_cache(maxsize=512)
def _layout(places: _Places, workers: int, clients: int, servers: int) -> Layout:
    size = workers // clients
    by_kind = {"host": _Loads(), "rack": _Loads(), "server host": _Loads()}
    _place_servers(places, servers, by_kind)
    members, parallel, client_hosts = _place_clients(places, workers, size, by_kind)
    hosts = by_kind["host"]
    leaders = list(hosts.leaders.values())
    by_leaders = servers == 0 and len(leaders) > 1
    peer_members, peers = ring_share(leaders) if by_leaders else (1, 0.0)
    if places.per_rack is None:
        del by_kind["rack"]
    zones = [
        zone for kind in by_kind for zone in by_kind[kind].zones(kind, clients, servers, peers)
    ]
    return Layout(
        _distinct(zones),
        members,
        peer_members,
        client_hosts,
        min(size, places.per_host) if size > 1 else 0,
        parallel,
        hosts.ring_total,
        hosts.spread_total,
    )


def _place_servers(places: _Places, servers: int, by_kind: Dict[str, _Loads]) -> None:
    """Share the servers out over their hosts, in turn."""
    kind, among = "host", places.hosts
    if places.server_hosts:
        kind, among = "server host", places.server_hosts
    for host in range(min(servers, among)):
        by_kind[kind].servers[host] = count = len(range(host, servers, among))
        if kind == "host":
            by_kind["rack"].servers[places.rack(host)] += count


def _place_clients(
    places: _Places, workers: int, size: int, by_kind: Dict[str, _Loads]
) -> Tuple[int, int, int]:
    """Add all clients; return what `Layout` calls ring_members, parallel and client_hosts."""
    members, parallel, client_hosts = 1, places.per_host, 1
    for start in range(0, workers, size):
        counts = _counts(start, start + size, places.per_host)
        number, ring = ring_share(counts)
        if len(counts) > 1:
            members, client_hosts = max(members, number), max(client_hosts, len(counts))
            parallel = min(parallel, counts[0], counts[-1])
        first, last = start // places.per_host, (start + size - 1) // places.per_host
        by_kind["host"].add_client(range(first, last + 1), ring, len(counts))
        racks = range(places.rack(first), places.rack(last) + 1)
        by_kind["rack"].add_client(racks, ring, len(counts))
    return members, parallel, client_hosts


def _counts(start: int, stop: int, per_host: int) -> List[int]:
    """Return how many of the workers ``range(start, stop)`` are on each of their hosts."""
    first = min(per_host - start % per_host, stop - start)
    if first == stop - start:
        return [first]
    last = (stop - 1) % per_host + 1
    return [first, *[per_host] * ((stop - start - first - last) // per_host), last]


def _distinct(zones: Sequence[Zone]) -> Tuple[Zone, ...]:
    """Of zones with the same loads keep the first: thousands of hosts have a handful of loads."""
    kept: Dict[Tuple[object, ...], Zone] = {}
    for zone in zones:
        kept.setdefault((zone.kind, *zone[2:]), zone)
    return tuple(kept.values())
