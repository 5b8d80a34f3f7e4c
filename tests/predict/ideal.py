"""Clusters on which only the wire costs anything, so that times can be worked out by hand."""

from dataclasses import replace

from gluon_esgd.predict import Cluster, Constants, Work, predict

FREE = 1e18  # bytes a second
IDEAL = Constants(
    efficiency=1.0,
    latency_s=0.0,
    server_bytes_per_s=FREE,
    agent_bytes_per_s=FREE,
    memory_bytes_per_s=FREE,
    socket_bytes_per_s=FREE,
    stock_duplex=1.0,
    duplex=1.0,
    pipelining=1.0,
    exchange_s=0.0,
    overhead_s=0.0,
)
MB = 1e6
SLOW = 12.5 * MB  # 100 Mbit/s
NEVER = 1 << 40  # steps between exchanges


def cluster(hosts=6, per_host=2, link=SLOW, constants=None, **more):
    """The cluster of the issue unless told otherwise, ideal but for the given constants."""
    return Cluster(hosts, per_host, link, constants=replace(IDEAL, **(constants or {})), **more)


def work(parameter_bytes=25 * MB, compute_s=1e-9, **more):
    return Work(parameter_bytes, compute_s, **more)


def step(configuration, on=None, of=None):
    return predict(of or work(), on or cluster(), configuration).step_s
