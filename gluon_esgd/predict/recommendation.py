"""Which number of clients and which interval a cluster is best served with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Sequence, Tuple

from .cluster import Cluster
from .configuration import Configuration
from .prediction import Prediction, predict
from .work import Work

__all__ = ["INTERVALS", "Choice", "divisors", "recommend"]

INTERVALS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

_CHEAP = 0.03  # of a step, what exchanges may cost
_EQUAL = 0.05  # step times that differ by less do not pay for what more clients cost
_NEVER = 1 << 40  # an interval without an end


@dataclass(frozen=True)
class Choice:
    """A configuration, what it is predicted to do, and whether it is the recommended one."""

    configuration: Configuration
    prediction: Prediction
    is_best: bool = False


def recommend(
    work: Work,
    cluster: Cluster,
    rule: str,
    workers: int,
    servers: int = 1,
    clients: Sequence[int] = (),
    intervals: Sequence[int] = (),
    **more: Any,
) -> List[Choice]:
    """Compare numbers of clients and intervals; return all, fastest first, one marked as best.

    For each number of clients the interval is the *smallest* with which exchanges are in time and
    lengthen a step by 3 per cent at most, since a longer one is always faster, but convergence
    pays for it. Of these the best has the shortest step; within 5 per cent of it the one with the
    fewest clients. Where no interval is cheap for any number of clients the longest is taken.

    Parameters
    ----------
    work : Work
    cluster : Cluster
    rule : {'sgd', 'asgd', 'esgd'}
    workers, servers : int
    clients : sequence of int, optional
        Divisors of the workers; all of them unless given. One client is pure MPI without servers.
    intervals : sequence of int, optional
        1, 2, 4, ... 256 unless given; of no meaning under ``sgd``.
    **more
        Further fields of `Configuration`. Where `lazy` is not among them it is the smallest with
        which no step waits, of at least 1 and the interval at most.

    Raises
    ------
    ValueError
        Another rule, or as `Configuration` and `predict`.
    """
    if rule not in ("sgd", "asgd", "esgd"):
        raise ValueError(f"rule {rule!r} must be one of sgd, asgd, esgd: others have no choices")
    rows = [
        [_choice(work, cluster, each, "lazy" in more) for each in row]
        for row in (
            _row(rule, workers, count, servers, intervals or INTERVALS, more)
            for count in clients or divisors(workers)
        )
    ]
    best = _best([_cheap(row, work, cluster) for row in rows])
    every = [replace(c, is_best=c is best) for row in rows for c in row]
    return sorted(every, key=lambda c: (c.prediction.step_s, not c.is_best))


def divisors(n: int) -> List[int]:
    """Return all divisors of `n`, from 1 up."""
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


def _row(
    rule: str,
    workers: int,
    clients: int,
    servers: int,
    intervals: Sequence[int],
    more: Dict[str, Any],
) -> List[Configuration]:
    """Return the configurations with so many clients; one client needs no center."""
    if clients == 1:
        return [Configuration("sgd", workers, **more)]
    if rule == "sgd":
        return [Configuration(rule, workers, clients, servers, **more)]
    lazy = more.get("lazy", 1)
    return [
        Configuration(
            rule, workers, clients, servers, interval, **{**more, "lazy": min(lazy, interval)}
        )
        for interval in intervals
    ]


def _choice(
    work: Work, cluster: Cluster, configuration: Configuration, lazy_is_given: bool
) -> Choice:
    told = predict(work, cluster, configuration)
    if configuration.exchanges and not lazy_is_given:
        needed = math.ceil(told.exchange_s / told.step_without_exchanges_s)
        lazy = max(1, min(needed, configuration.counts[3]))
        configuration = replace(configuration, lazy=lazy)
        told = predict(work, cluster, configuration)
    return Choice(configuration, told)


def _cheap(row: Sequence[Choice], work: Work, cluster: Cluster) -> Tuple[Choice, bool]:
    """Return the first of choices by interval whose exchanges cost little, and whether they do."""
    longest = row[-1]
    if not longest.configuration.exchanges:
        return longest, True
    never = replace(longest.configuration, interval=_NEVER)
    bound_s = (1 + _CHEAP) * predict(work, cluster, never).step_s
    for choice in row:
        in_time = choice.prediction.steps_per_exchange == choice.configuration.interval
        if in_time and choice.prediction.step_s <= bound_s:
            return choice, True
    return longest, False


def _best(candidates: Sequence[Tuple[Choice, bool]]) -> Choice:
    """Of one candidate for each number of clients return the recommended one."""
    good = [choice for choice, cheap in candidates if cheap] or [c for c, _ in candidates]
    bound_s = (1 + _EQUAL) * min(choice.prediction.step_s for choice in good)
    near = [choice for choice in good if choice.prediction.step_s <= bound_s]
    return min(near, key=lambda choice: choice.configuration.counts[1])
