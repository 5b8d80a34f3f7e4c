"""How much each link carries: by hand, and against a count of every message's bytes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gluon_esgd.predict import Configuration, predict
from gluon_esgd.predict.traffic import layout_of, ring_share

from .ideal import MB, cluster, work

B = 25 * MB


def carried(configuration, on=None):
    told = predict(work(), on or cluster(), configuration)
    return told.busiest_link, told.busiest_link_direction, pytest.approx(told.busiest_link_bytes)


@pytest.mark.parametrize(
    ("configuration", "link"),
    [
        # Of twelve workers two are on the server's host; ten push and pull over its link.
        (Configuration("dist_sync", 12), ("host 0", "each way", 10 * B)),
        (Configuration("dist_async", 12), ("host 0", "each way", 10 * B)),
        (Configuration("sgd", 12, 12), ("host 0", "each way", 10 * B)),
        (Configuration("asgd", 12, 12, center_wait_s=1e6), ("host 0", "each way", 10 * B)),
        # Two servers: half of ten each, and half of its own two workers' to the other.
        (Configuration("dist_sync", 12, servers=2), ("host 0", "each way", 6 * B)),
        # One client: a ring of six hosts.
        (Configuration("sgd", 12), ("host 0", "each way", 2 * 5 / 6 * B)),
        # Two clients of three hosts: rings, then on host 0, which has a leader and the server,
        # the other leader's round, and the broadcast of its own.
        (Configuration("sgd", 12, 2), ("host 0", "out", (4 / 3 + 1 + 4 / 3) * B)),
        # Rare exchanges: only the ring is left.
        (Configuration("esgd", 12, 2, interval=1 << 40), ("host 0", "each way", 4 / 3 * B)),
        # Leaders add up among themselves: a ring of two.
        (Configuration("sgd", 12, 2, servers=0), ("host 0", "out", (4 / 3 + 1 + 4 / 3) * B)),
        # Clients of three on hosts of two: a ring of ranks, and host 1 is in two of them.
        (Configuration("esgd", 12, 4, interval=1 << 40), ("host 1", "each way", 2 * 4 / 3 * B)),
        # A client on each host: nothing but exchanges, all with host 0.
        (Configuration("esgd", 12, 6, interval=10, center_wait_s=1e6),
         ("host 0", "each way", 5 / 10 * B)),
        (Configuration("sgd", 2), ("", "", 0)),
    ],
)  # fmt: skip
def test_the_busiest_link_by_hand(configuration, link):
    assert carried(configuration) == link


def test_half_floats_halve_what_leaves_a_host_but_for_broadcasts():
    half = Configuration("sgd", 12, half_floats=True)
    assert carried(half) == ("host 0", "each way", 5 / 6 * B)
    rounds = Configuration("sgd", 12, 2, half_floats=True)
    assert carried(rounds) == ("host 0", "out", ((4 / 3 + 1) / 2 + 4 / 3) * B)


def test_a_host_of_its_own_for_the_server():
    on = cluster(server_hosts=1, server_link_bytes_per_s=1 * MB)
    assert carried(Configuration("dist_sync", 12), on) == ("server host 0", "each way", 12 * B)
    told = predict(work(), on, Configuration("dist_sync", 12))
    assert told.step_s == pytest.approx(12 * 25)


def test_racks_share_an_uplink():
    on = cluster(hosts_per_rack=3, uplink_bytes_per_s=1 * MB)
    # Of two clients each has a rack for itself; rings stay inside.
    two = predict(work(), on, Configuration("esgd", 12, 2, interval=1 << 40))
    assert two.busiest_link == "host 0"
    assert two.step_s == pytest.approx(4 / 3 * 25 / 12.5)
    one = predict(work(), on, Configuration("sgd", 12))
    assert (one.busiest_link, one.step_s) == ("rack 0", pytest.approx(2 * 5 / 6 * 25))


def test_leaders_of_one_rack_need_no_uplink():
    on = cluster(12, 1, hosts_per_rack=6, uplink_bytes_per_s=1.0)
    near = Configuration("sgd", 6, 6, servers=0)
    assert carried(near, on) == ("host 0", "each way", 2 * 5 / 6 * B)
    far = Configuration("sgd", 12, 12, servers=0)
    assert carried(far, on) == ("rack 0", "each way", 2 * 11 / 12 * B)


def test_which_ring_it_is():
    assert ring_share([2, 2, 2]) == (3, pytest.approx(4 / 3))
    assert ring_share([2, 1]) == (3, pytest.approx(4 / 3))  # of ranks, since a host has one
    assert ring_share([1, 1]) == (2, pytest.approx(1))
    assert ring_share([8]) == (1, 0)


def counted(on, workers, clients, servers):
    """Bytes out and in by link, one message after the other, in units of the parameters."""
    host_of = [worker // on.workers_per_host for worker in range(workers)]
    size = workers // clients
    rings, pushes = Counter(), Counter()

    def zones(host):
        """The links behind which a host is; hosts of servers alone are negative."""
        if host < 0:
            return {("server host", -host - 1)}
        racks = {("rack", host // on.hosts_per_rack)} if on.hosts_per_rack else set()
        return {("host", host), *racks}

    def send(load, a, b, amount):
        for zone in zones(a) - zones(b):
            load[zone, "out"] += amount
        for zone in zones(b) - zones(a):
            load[zone, "in"] += amount

    for client in range(clients):
        hosts = host_of[client * size : (client + 1) * size]
        by_host = Counter(hosts)
        ring = sorted(by_host) if min(by_host.values()) > 1 else hosts
        for a, b in zip(ring, [*ring[1:], ring[0]]):
            send(rings, a, b, 2 * (len(ring) - 1) / len(ring) if len(by_host) > 1 else 0)
        for server in range(servers):
            at = -1 - server % on.server_hosts if on.server_hosts else server % on.hosts
            send(pushes, hosts[0], at, 1 / servers)
    return rings, pushes


def shapes(count):
    for seed in range(count):
        draw = random.Random(seed)
        hosts, per_host = draw.randint(1, 14), draw.randint(1, 4)
        clients = draw.choice([1, 2, draw.randint(1, hosts * per_host)])
        clients = min(clients, hosts * per_host)
        workers = clients * draw.randint(1, hosts * per_host // clients)
        per_rack = draw.choice([None, None, draw.randint(1, hosts)])
        on = cluster(
            hosts, per_host, server_hosts=draw.choice([0, 0, 1, 2]), hosts_per_rack=per_rack,
            uplink_bytes_per_s=per_rack and 1.0,
        )  # fmt: skip
        yield on, workers, clients, draw.randint(1, 5)


def test_loads_are_those_of_all_messages_counted():
    for on, workers, clients, servers in shapes(500):
        rings, pushes = counted(on, workers, clients, servers)
        wanted = {
            (kind, *(round(load[zone, way], 9) for load, way in
                     ((rings, "out"), (rings, "in"), (pushes, "out"), (pushes, "in"))))
            for zone in {zone for zone, _ in [*rings, *pushes]}
            for kind in zone[:1]
        }  # fmt: skip
        layout = layout_of(on, Configuration("sgd", workers, clients, servers))
        got = {
            (z.kind, *(round(x, 9) for x in (z.ring, z.ring, z.push_out, z.push_in)))
            for z in layout.zones
        }
        idle = {("host", 0, 0, 0, 0), ("rack", 0, 0, 0, 0), ("server host", 0, 0, 0, 0)}
        assert got - idle == wanted - idle, (on, workers, clients, servers)


def test_ten_thousand_workers_have_a_handful_of_different_links():
    on = cluster(1250, 8)
    for clients in (1, 16, 50, 1250, 10_000):
        layout = layout_of(on, Configuration("esgd", 10_000, clients, 8))
        assert len(layout.zones) < 40
        pushed = predict(work(), on, Configuration("sgd", 10_000, clients, 1)).busiest_link_bytes
        there = max(1, clients // 1250)  # leaders on the server's host
        assert clients == 1 or pushed >= (clients - there) * B


def test_too_many_workers_for_the_hosts():
    with pytest.raises(ValueError, match="workers 13 must be at most 12, the 2 of each of 6 hosts"):
        layout_of(cluster(), Configuration("sgd", 13))
