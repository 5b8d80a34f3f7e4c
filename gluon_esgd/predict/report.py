"""A prediction as text."""

from __future__ import annotations

import math
from typing import List, Sequence

from .cluster import Cluster
from .configuration import STOCK, Configuration
from .prediction import Prediction
from .recommendation import Choice
from .work import Work

__all__ = ["text"]

_ROWS = 20

_CONVERGENCE = """\
Convergence also matters: more clients and longer intervals need more steps to the same accuracy
(docs/choosing.md). So * is not the first row: it has the shortest interval with which exchanges are
in time and cost 3 per cent of a step at most (where there is none, the longest), and of the numbers
of clients whose steps are then within 5 per cent of the shortest the smallest."""


def text(
    work: Work, cluster: Cluster, name: str, choices: Sequence[Choice], is_calibrated: bool
) -> str:
    """Return one configuration in detail, or a table of several with the best in detail below."""
    best = next(choice for choice in choices if choice.is_best)
    constants = "with fitted constants" if is_calibrated else "with constants that are guesses"
    told = [
        f"A prediction {constants}, not a measurement (docs/predict.md).",
        f"{name}, {_mb(work.parameter_bytes)}; {best.configuration.workers} workers on "
        f"{cluster.hosts} hosts, links of {_rate(cluster.link_bytes_per_s)}",
        "",
    ]
    if len(choices) > 1:
        told += [*_table(choices), "", _CONVERGENCE, ""]
    return "\n".join([*told, *_detail(best), *_start(best.configuration)])


def _table(choices: Sequence[Choice]) -> List[str]:
    """The fastest choices, and the best."""
    shown = [c for i, c in enumerate(choices) if i < _ROWS or c.is_best]
    head = (
        f"{'clients':>9}{'interval':>10}{'lazy':>6}{'step':>11}{'epoch':>11}{'busiest link':>14}"
        "  bottleneck"
    )
    lines = [head, *(_line(choice) for choice in shown)]
    if len(choices) > len(shown):
        lines.append(f"  and {len(choices) - len(shown)} slower ones; --json has them")
    return lines


def _line(choice: Choice) -> str:
    _, clients, _, interval = choice.configuration.counts
    told = choice.prediction
    meets = choice.configuration.exchanges
    late = ", exchanges are late" if meets and told.steps_per_exchange > interval else ""
    return (
        f"{'*' if choice.is_best else '':2}{clients:>7}{interval if meets else '-':>10}"
        f"{choice.configuration.lazy if meets else '-':>6}"
        f"{_time(told.step_s):>11}{_time(told.epoch_s):>11}{_mb(told.busiest_link_bytes):>14}"
        f"  {told.bottleneck}{late}"
    )


def _detail(choice: Choice) -> List[str]:
    told = choice.prediction
    spent = ", ".join(f"{name} {_time(s)}" for name, s in told.parts.items() if s >= 5e-7)
    lines = [
        _title(choice),
        f"  step           {_time(told.step_s)}: {spent}",
        f"  epoch          {_time(told.epoch_s)}, {told.samples_per_s:,.0f} samples/s",
        f"  busiest link   {_link(told)}",
        f"  bottleneck     {told.bottleneck}",
    ]
    if choice.configuration.exchanges:
        lines.insert(3, f"  exchange       {_exchange(choice)}")
    return lines


def _start(how: Configuration) -> List[str]:
    """The command that starts such a job."""
    workers, clients, servers, interval = how.counts
    if how.rule in STOCK:
        return []
    told = f"  start it with  gluon-esgd run -n {workers}"
    if clients > 1 or servers:
        told += f" --clients {clients} --servers {servers} --rule {how.rule}"
    if how.exchanges:
        told += f" --interval {interval}" + (f" --lazy {how.lazy}" if how.lazy != 1 else "")
    return [told + " --compression fp16" * how.half_floats]


def _title(choice: Choice) -> str:
    how = choice.configuration
    _, clients, servers, interval = how.counts
    if clients == 1 and not how.exchanges and how.rule not in STOCK:
        return "one client, pure MPI"
    several = "clients" if clients > 1 else "client"
    told = f"rule {how.rule}, {clients} {several}, {servers} server{'s' * (servers != 1)}"
    return f"{told}, interval {interval}, lazy {how.lazy}" if how.exchanges else told


def _link(told: Prediction) -> str:
    if not told.busiest_link:
        return "none: nothing leaves a host"
    return (
        f"{told.busiest_link}, {told.busiest_link_direction}: {_mb(told.busiest_link_bytes)} a step"
    )


def _exchange(choice: Choice) -> str:
    told = choice.prediction
    every = f"{_time(told.exchange_s)}, every {told.steps_per_exchange:.0f} steps"
    late = told.steps_per_exchange > choice.configuration.counts[3]
    return f"{every}: late, and put off" if late else every


def _time(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:,.1f} h"
    if seconds >= 90:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _mb(amount: float) -> str:
    return f"{amount / 1e6:,.1f} MB"


def _rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    power = 9 if bits >= 1e9 else 6
    unit = "Gbit/s" if power == 9 else "Mbit/s"
    return f"{bits / 10**power:g} {unit}" if math.isfinite(bits) else "no limit"
