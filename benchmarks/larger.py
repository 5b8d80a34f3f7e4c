"""What the cost model says of clusters on which nothing was measured. All of it is prediction.

    python benchmarks/larger.py --calibration constants.json --output larger.json

The clusters and what their processors take are assumptions, written beside the figures: the kind
of machine that the method was first described for, and 1,000 and 10,000 workers. For each the six
algorithms and MPI alone are compared, the elastic ones at the interval that
`gluon_esgd.predict.recommend` takes, and MXNet's own ``dist_sync``.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List

from common import algorithm, describe, write

from gluon_esgd.predict import (
    MODELS,
    Choice,
    Cluster,
    Configuration,
    Constants,
    Work,
    predict,
    read_constants,
    recommend,
)

LATENCY_S = 20e-6  # of a message; between pretended hosts it is next to nothing
GIGABIT = 0.125e9  # bytes
RESNET50 = 4.0 * MODELS["resnet50_v1"]


@dataclass(frozen=True)
class Case:
    """A cluster, what it trains, and how it is shared out."""

    name: str
    cluster: Cluster
    work: Work
    clients: int
    servers: int

    @property
    def workers(self) -> int:
        """All hosts full."""
        return self.cluster.hosts * self.cluster.workers_per_host

    @property
    def assumes(self) -> str:
        """What is written beside the figures."""
        on, work = self.cluster, self.work
        said = (
            f"{on.hosts:,} hosts of {on.workers_per_host} GPUs that take {work.compute_s:g} s for "
            f"{work.batch_size} pictures, {on.link_bytes_per_s / GIGABIT:g} Gbit/s"
        )
        if on.uplink_bytes_per_s is not None:
            uplink = on.uplink_bytes_per_s / GIGABIT
            said += f", racks of {on.hosts_per_rack} hosts behind {uplink:g} Gbit/s"
        return said


def racks(hosts: int, gpus: int, link: float, uplink: float) -> Cluster:
    """Return hosts in racks of 25; rates are Gbit/s."""
    return Cluster(
        hosts, gpus, link * GIGABIT, hosts_per_rack=25, uplink_bytes_per_s=uplink * GIGABIT
    )


OLDER, NEWER = Work(RESNET50, 0.5, 64), Work(RESNET50, 0.25, 64)
CASES = [
    Case("12 workers, 1 Gbit/s", Cluster(6, 2, 1 * GIGABIT), OLDER, clients=2, servers=2),
    Case("12 workers, 10 Gbit/s", Cluster(6, 2, 10 * GIGABIT), OLDER, clients=2, servers=2),
    Case("1,000 workers", racks(250, 4, 25, 100), NEWER, clients=10, servers=10),
    Case("10,000 workers", racks(1250, 8, 100, 400), NEWER, clients=50, servers=50),
]


def choices(case: Case, cluster: Cluster) -> Iterator[Choice]:
    """Yield what is compared: stock, each rule with every worker a client and with few, MPI."""

    def fixed(rule: str, clients: int, servers: int) -> Choice:
        configuration = Configuration(rule, case.workers, clients, servers)
        return Choice(configuration, predict(case.work, cluster, configuration))

    yield fixed("dist_sync", case.workers, case.servers)
    for clients in (case.workers, case.clients):
        yield fixed("sgd", clients, case.servers)
        yield fixed("asgd", clients, case.servers)
        rows = recommend(case.work, cluster, "esgd", case.workers, case.servers, [clients])
        yield next(choice for choice in rows if choice.is_best)
    yield fixed("sgd", 1, 0)


def name(case: Case, configuration: Configuration) -> str:
    """Return what the table calls it."""
    rule, clients = configuration.rule, configuration.clients
    if rule.startswith("dist_"):
        return f"MXNet `{rule}`"
    if clients == 1:
        return "MPI"
    return algorithm(rule, clients == case.workers)


TOLD = (
    *("steps_per_exchange", "step_s", "epoch_s"),
    *("busiest_link", "busiest_link_bytes", "bottleneck"),
)


def rows(case: Case, constants: Constants) -> List[Dict[str, Any]]:
    """Return the figures of a case."""
    made = []
    for choice in choices(case, replace(case.cluster, constants=constants)):
        told, configuration = choice.prediction.as_dict(), choice.configuration
        made.append(
            {
                "name": name(case, configuration),
                "clients": configuration.clients,
                "servers": configuration.servers,
                "interval": configuration.interval if configuration.exchanges else None,
                "lazy": configuration.lazy if configuration.exchanges else None,
                **{key: told[key] for key in TOLD},
            }
        )
    return made


def table(found: List[Dict[str, Any]]) -> str:
    """Return the rows as Markdown; an epoch beside that of the first row."""
    lines = ["| | clients | servers | interval, lazy | steps between exchanges | ms a step |"]
    lines[0] += " s an epoch | x | bottleneck |"
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in found:
        often = "" if row["interval"] is None else f"{row['interval']}, {row['lazy']}"
        steps = "" if row["interval"] is None else f"{row['steps_per_exchange']:g}"
        cells = [row["name"], row["clients"], row["servers"], often, steps]
        cells += [f"{row['step_s'] * 1e3:,.0f}", f"{row['epoch_s']:,.1f}"]
        cells.append(f"{found[0]['epoch_s'] / row['epoch_s']:.1f}")
        lines.append("| " + " | ".join(map(str, [*cells, row["bottleneck"]])) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--calibration", type=Path, help="constants that predictions.py wrote")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    args = parser.parse_args()
    constants = read_constants(str(args.calibration)) if args.calibration else Constants()
    constants = replace(constants, latency_s=LATENCY_S)
    found = {case.name: rows(case, constants) for case in CASES}
    for case in CASES:
        print(f"**{case.name}**, predicted: {case.assumes}, {LATENCY_S * 1e6:g} µs a message\n")
        print(f"{table(found[case.name])}\n")
    if args.output is not None:
        about = [{"name": case.name, "assumes": case.assumes} for case in CASES]
        result = {"constants": vars(constants), "cases": about, "predicted": found}
        write(args.output, {**describe(), **result})


_Raw = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
