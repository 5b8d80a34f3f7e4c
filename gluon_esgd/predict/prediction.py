"""A step and an epoch of a configuration: what is hidden behind what, and what is left."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, NamedTuple, Tuple

from .cluster import Cluster
from .configuration import STOCK, Configuration
from .costs import Costs, mixed
from .work import Work

__all__ = ["Prediction", "predict"]


_TURNS = 20  # from one estimate to the next; the difference halves at least each time


@dataclass(frozen=True)
class Prediction:
    """What is to be expected of a configuration; of its slowest client.

    Attributes
    ----------
    step_s, epoch_s : float
        Seconds of a step, averaged over those with and without an exchange, and of an epoch.
    samples_per_s : float
        Of all workers together.
    busiest_link : str
        "host 0", "rack 1", "server host 0", alike ones by the first; "" where nothing leaves a
        host.
    busiest_link_direction : {'in', 'out', 'each way', ''}
    busiest_link_bytes : float
        Of data in a step, in that direction.
    bottleneck : str
        The one in `busy_s` that is busy longest.
    busy_s : dict of str to float
        Seconds of work in a step, hidden or not, of: "compute", "memory", "wire inside clients",
        "servers' link" or "leaders' links" (whichever is the narrow one) or "wire between
        leaders", "servers' adding", "agents", "latency".
    parts : dict of str to float
        What `step_s` is the sum of: "compute", "shared cores", "allreduce" and "rounds" (what
        backward does not hide of them), "wait for exchanges", "broadcast of exchanges", "links
        shared with exchanges", "fixed" (copies of the weights where exchanges are due, too).
    exchange_s : float
        From the snapshot to the servers' answer; 0 where there are no exchanges.
    steps_per_exchange : float
        1 where clients meet at every step, inf where they never do; else the interval, or a
        multiple of it where exchanges are late and are put off.
    """

    step_s: float
    epoch_s: float
    samples_per_s: float
    busiest_link: str
    busiest_link_direction: str
    busiest_link_bytes: float
    bottleneck: str
    busy_s: Dict[str, float]
    parts: Dict[str, float]
    exchange_s: float
    steps_per_exchange: float

    @property
    def step_without_exchanges_s(self) -> float:
        """What a step takes in which exchanges cost nothing."""
        return sum(s for name, s in self.parts.items() if "exchanges" not in name)

    def as_dict(self) -> Dict[str, Any]:
        """Return all of it as JSON has it; `steps_per_exchange` is None where it is inf."""
        told = asdict(self)
        if math.isinf(self.steps_per_exchange):
            told["steps_per_exchange"] = None
        return told


class _Exchange(NamedTuple):
    """How long it takes, every how many steps there is one, and what steps pay for each."""

    duration_s: float = 0.0
    steps: float = math.inf
    wait_s: float = 0.0
    broadcast_s: float = 0.0
    shared_s: float = 0.0


def predict(work: Work, cluster: Cluster, configuration: Configuration) -> Prediction:
    """Predict what a step takes, from the formulas that `docs/predict.md` derives.

    Raises
    ------
    ValueError
        The cluster has no place for so many workers.
    """
    costs = Costs(work, cluster, configuration)
    rounds_s = _rounds_s(costs, cluster, configuration)
    comm_s = costs.allreduce_s + rounds_s
    compute_s = _computing_s(work, cluster, configuration, comm_s, costs.pieces)
    work = replace(work, compute_s=compute_s)
    step_s = _overlapped(work, comm_s, costs.pieces)
    exchange = _Exchange(steps=1.0 if rounds_s else math.inf)
    fixed_s = cluster.constants.overhead_s
    if configuration.exchanges:
        fixed_s += costs.snapshot_s / configuration.counts[3]
        exchange = _exchange(costs, work, configuration, step_s + fixed_s)
    meetings = 1 / exchange.steps
    of_rounds = rounds_s / comm_s if rounds_s else 0.0
    exposed_s = step_s - work.compute_s
    parts = {
        "compute": work.compute_s,
        "shared cores": _overlapped(work, comm_s, costs.pieces, costs.cores_s(meetings)) - step_s,
        "allreduce": exposed_s * (1 - of_rounds),
        "rounds": exposed_s * of_rounds,
        "wait for exchanges": exchange.wait_s * meetings,
        "broadcast of exchanges": exchange.broadcast_s * meetings,
        "links shared with exchanges": exchange.shared_s * meetings,
        "fixed": fixed_s,
    }
    busy_s = costs.busy_s(work.compute_s, meetings)
    return _told(work, configuration, parts, busy_s, costs.busiest(meetings), exchange)


def _told(
    work: Work,
    configuration: Configuration,
    parts: Dict[str, float],
    busy_s: Dict[str, float],
    link: Tuple[str, str, float],
    exchange: _Exchange,
) -> Prediction:
    step_s = sum(parts.values())
    samples_per_s = configuration.workers * work.batch_size / step_s
    return Prediction(
        step_s,
        work.samples_per_epoch / samples_per_s,
        samples_per_s,
        *link,
        max(busy_s, key=lambda name: busy_s[name]),
        busy_s,
        parts,
        exchange.duration_s,
        exchange.steps,
    )


def _overlapped(work: Work, comm_s: float, pieces: int, cores_s: float = 0.0) -> float:
    """Return a step in which backward hides communication.

    Backward makes the gradients of `pieces` buckets one after the other, and buckets travel one
    after the other. Either backward ends last, with the last bucket still to go, or the buckets
    have queued since the first one was ready:
    ``forward + max(backward + comm / pieces, backward / pieces + comm)``.
    Work of the same cores makes backward longer, but not what only waits for the wire.
    """
    backward_s = work.compute_s * work.backward_share
    forward_s = work.compute_s - backward_s
    by_compute = backward_s + cores_s + comm_s / pieces
    return forward_s + max(by_compute, backward_s / pieces + comm_s)


def _computing_s(
    work: Work, cluster: Cluster, configuration: Configuration, comm_s: float, pieces: int
) -> float:
    """Return what compute takes where hosts are pretended, on cores that not all want at once.

    `Work.compute_s` is that of all workers at once. Clients that do not wait for each other meet
    by chance: beside the workers of one, those of the other p - 1 compute for the share of a step
    that compute takes. The time goes with how many compute at once, down to one for each core.
    """
    workers, clients, servers, _ = configuration.counts
    free = (configuration.exchanges and servers > 0) or configuration.rule == "dist_async"
    computing_s = work.compute_s
    if cluster.cores is None or not free:
        return computing_s
    most = max(cluster.cores, workers)
    for _ in range(_TURNS):
        step_s = _overlapped(replace(work, compute_s=computing_s), comm_s, pieces)
        at_once = workers * (1 + (clients - 1) * computing_s / step_s) / clients
        computing_s = max(1e-9, work.compute_s * max(cluster.cores, at_once) / most)
    return computing_s


def _rounds_s(costs: Costs, cluster: Cluster, configuration: Configuration) -> float:
    """Return what clients that meet at every step add to a step's communication.

    ``sgd``: for each bucket allreduce, push, pull, broadcast, see `_pipeline_s`; without servers
    nothing runs beside another bucket's. Stock rules: each key by itself, so that pulls run beside
    the pushes of other keys, as far as `Constants.stock_duplex` says.
    """
    _, clients, servers, _ = configuration.counts
    if configuration.rule in STOCK:
        duplex = cluster.constants.stock_duplex
        wire_s = mixed(duplex, costs.both_ways_s, 2 * costs.one_way_s)
        return max(wire_s, costs.add_s) + costs.turn_s
    if configuration.rule != "sgd" or clients == 1:
        return 0.0
    turns_s = costs.pieces * costs.turn_s
    if not servers:
        return costs.peers_s + costs.spread_s + turns_s
    return _pipeline_s(costs, cluster) - costs.allreduce_s + turns_s


def _pipeline_s(costs: Costs, cluster: Cluster) -> float:
    """Return what the stages of all buckets take, that of one beside those of the others.

    As long as the link, the lane (which makes allreduces and broadcasts) or the server that has
    most to do; before and after, the stages of one bucket stand alone. `Constants.pipelining`
    says how far this comes true.
    """
    share, push_s = cluster.constants.pipelining, max(costs.one_way_s, costs.add_s)
    lane_s = costs.allreduce_s + costs.spread_s
    in_order_s = lane_s + push_s + costs.one_way_s
    at_once_s = max(costs.together_s, lane_s, costs.add_s)
    piped_s = at_once_s + (in_order_s - at_once_s) / costs.pieces
    return mixed(share, piped_s, in_order_s)


def _exchange(costs: Costs, work: Work, configuration: Configuration, step_s: float) -> _Exchange:
    """Return the exchanges of steps that take `step_s` without them."""
    if configuration.servers == 0:
        return _exchange_of_leaders(costs, work, configuration, step_s)
    exposed_s = _overlapped(work, costs.allreduce_s, costs.pieces) - work.compute_s
    exposed = exposed_s / costs.allreduce_s if costs.allreduce_s else 0.0
    ring_s = costs.ring_beside_servers_s
    _, _, _, interval = configuration.counts
    all_s, shared_s = step_s, 0.0
    for _ in range(_TURNS):
        slow_ring_s = ring_s + shared_s
        duration_s = _duration_s(costs, min(1.0, slow_ring_s / all_s))
        plain_s = step_s + shared_s * exposed
        late_s = duration_s - configuration.lazy * plain_s
        steps, wait_s = float(interval), max(0.0, late_s)
        if late_s > configuration.center_wait_s:
            wait_s = configuration.center_wait_s
            steps *= 1 + math.ceil((late_s - wait_s) / (interval * plain_s))
        all_s = plain_s + (wait_s + costs.spread_s) / steps
        # The other way round: a ring has half of a link while an exchange is on it.
        shared_s = ring_s / (1 - min(1.0, duration_s / (steps * all_s)) / 2) - ring_s
    return _Exchange(duration_s, steps, wait_s, costs.spread_s, shared_s * exposed * steps)


def _duration_s(costs: Costs, active: float) -> float:
    """Return how long an exchange takes when all clients are at it: pull, difference, push.

    A ring that is `active` for a share of the step takes half of a link that it shares.
    """
    wire_s = costs.exchange_wire_s / (1 - active / 2)
    return wire_s + costs.agent_s + max(0.0, costs.add_s - wire_s / 2) + costs.turn_s


def _exchange_of_leaders(
    costs: Costs, work: Work, configuration: Configuration, step_s: float
) -> _Exchange:
    """Return the exchange of a job without servers: an allreduce over the leaders.

    It keeps the leader's collectives waiting: with several ranks in a client what the next
    step has to do before its first bucket hides it, else `lazy` steps do.
    """
    workers, clients, _, interval = configuration.counts
    duration_s = costs.peers_s + costs.turn_s
    hidden_s = configuration.lazy * step_s
    if workers > clients:
        backward_s = work.compute_s * work.backward_share
        hidden_s = work.compute_s - backward_s + backward_s / costs.pieces
    return _Exchange(duration_s, float(interval), max(0.0, duration_s - hidden_s), costs.spread_s)
