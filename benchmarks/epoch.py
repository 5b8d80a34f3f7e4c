"""How long an epoch takes by each of the six algorithms, on hosts with slow links.

    python benchmarks/epoch.py --output benchmarks/results/epoch.json
    python benchmarks/epoch.py --quick

makes a cluster of namespaces (`cluster.py`, needs root), and trains a perceptron with
`--megabytes` of parameters on it by ``gluon-esgd run``: each rule with as many clients as there
are workers (dist-) and with fewer (mpi-). The baseline is MXNet's own: ``gluon.Trainer`` with
``kvstore='dist_sync'`` and its stock servers, no agents, in the same namespaces. Each configuration
is a job of its own. Time is that of the slowest worker over all timed steps, bytes are
read from the interfaces. Under rules asgd and esgd one interval passes before, then whole intervals
are timed until there are `--seconds` of them, for exchanges may take longer than an interval. Rule
"alone" is as many workers without any communication: what computing takes on this machine. Rows
that the output file holds are not run again, so a long table may be made in parts.
`epoch_report.py` makes tables and pictures of the files, `predictions.py` compares them with the
cost model.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

from cluster import Cluster, Network
from cluster_job import launch, launch_stock
from common import algorithm, describe, write

WORKER = Path(__file__).with_name("epoch_worker.py")
RULES = ["alone", "dist_sync", "sgd", "asgd", "esgd"]
WARM_UP = 2  # steps; the first one waits for all, and fills the center
LIMIT_S = 900.0


@dataclass(frozen=True)
class Configuration:
    """One job: what trains it, with how many clients and servers.

    `rule` is one of the library's, the name of a store of MXNet's, or "alone"; an interval of 1
    is each step, as is every step of rule "sgd".
    """

    rule: str
    clients: int
    servers: int
    interval: int = 1

    @property
    def is_stock(self) -> bool:
        """Whether it is MXNet without this library."""
        return self.rule == "alone" or self.rule.startswith("dist_")

    @property
    def may_be_late(self) -> bool:
        """Whether steps go on while an exchange is under way."""
        return self.rule in ("asgd", "esgd") and self.servers > 0

    def name(self, workers: int) -> str:
        """Return what tables call it."""
        if self.is_stock:
            return self.rule if self.rule == "alone" else f"MXNet {self.rule}"
        return algorithm(self.rule, self.clients == workers)


def arguments(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--hosts", type=int, default=6)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[25.0], help="of parameters")
    parser.add_argument("--rates", nargs="+", default=["100mbit"], help="of each host's link")
    parser.add_argument("--servers", type=int, nargs="+", default=[1])
    parser.add_argument("--clients", type=int, nargs="+", default=[12, 6, 4, 3, 2, 1])
    parser.add_argument("--rules", nargs="+", default=RULES, help="also dist_async, MXNet's")
    parser.add_argument("--interval", type=int, default=64, help="of esgd")
    parser.add_argument("--lazy", type=int, default=1, help="of asgd and esgd")
    parser.add_argument("--steps", type=int, default=4, help="at least, and whole intervals")
    parser.add_argument("--seconds", type=float, default=90.0, help="at least, of asgd and esgd")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16, help="of each worker")
    parser.add_argument("--samples", type=int, default=60_000, help="of an epoch")
    parser.add_argument("--quick", action="store_true", help="2 hosts, a few steps")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    args = parser.parse_args(argv)
    if args.quick:
        args.hosts, args.workers, args.clients, args.megabytes = 2, 4, [2, 1], [1.0]
        args.rules, args.interval, args.seconds = ["alone", "dist_sync", "esgd"], 4, 0.0
    return args


_Raw = argparse.RawDescriptionHelpFormatter


def configurations(args: argparse.Namespace) -> Iterator[Configuration]:
    """Yield what is to be run, the baseline first."""
    for servers in args.servers:
        for rule in args.rules:
            stock = Configuration(rule, args.workers, 0 if rule == "alone" else servers)
            if stock.is_stock:
                yield from [stock] if rule != "alone" or servers == args.servers[0] else []
                continue
            for clients in args.clients:
                if clients > 1:
                    interval = args.interval if rule == "esgd" else 1
                    yield Configuration(rule, clients, servers, interval)
    if 1 in args.clients:
        yield Configuration("sgd", 1, 0)


class Bench:
    """Runs configurations on a cluster."""

    def __init__(self, args: argparse.Namespace, cluster: Cluster, megabytes: float) -> None:
        self._args, self._cluster, self._megabytes = args, cluster, megabytes

    def run(self, configuration: Configuration) -> Dict[str, Any]:
        """Run one job; return its figures."""
        task = {
            "megabytes": self._megabytes,
            "batch": self._args.batch,
            "warm_up": max(WARM_UP, configuration.interval),
            "steps": max(self._args.steps, configuration.interval),
            "seconds": self._args.seconds if configuration.may_be_late else 0.0,
            "stock": configuration.is_stock,
            "store": None if configuration.rule == "alone" else configuration.rule,
        }
        with tempfile.TemporaryDirectory(prefix="epoch-") as folder:
            task["folder"] = folder
            self._launch(configuration, task)
            files = sorted(Path(folder).glob("worker*.json"))
            workers = [json.loads(file.read_text()) for file in files]
        if len(workers) != self._args.workers:
            raise SystemExit(f"{configuration}: {len(workers)} workers of {self._args.workers}")
        return self._figures(configuration, workers)

    def _launch(self, configuration: Configuration, task: Dict[str, Any]) -> None:
        cluster, workers, servers = self._cluster, self._args.workers, configuration.servers
        if configuration.is_stock:
            launch_stock(cluster, workers, servers, WORKER, task, LIMIT_S)
            return
        flags = {
            "--clients": configuration.clients,
            "--servers": servers,
            "--rule": configuration.rule,
        }
        if configuration.rule == "esgd":
            flags["--interval"] = configuration.interval
        if configuration.may_be_late:
            flags["--lazy"] = min(self._args.lazy, configuration.interval)
        launch(cluster, workers, flags, WORKER, task, LIMIT_S)

    def _figures(
        self, configuration: Configuration, workers: List[Dict[str, Any]]
    ) -> Dict[str, Any]:
        args = self._args
        step_s = max(worker["seconds"] / len(worker["step_s"]) for worker in workers)
        links: Dict[str, Dict[str, float]] = {}
        cpu: Dict[str, float] = {}
        for host in sorted({worker["host"] for worker in workers}):
            first = next(worker for worker in workers if worker["host"] == host)
            count = len(first["step_s"])
            links[host] = {way: moved / count for way, moved in first["link"].items()}
            for kind, seconds in first["cpu_s"].items():
                cpu[kind] = cpu.get(kind, 0.0) + seconds / count
        steps = [len(worker["step_s"]) for worker in workers]
        # Clients on the server's own host exchange all the time: the median, not the mean.
        often = statistics.median(w.get("exchanges", 0) / len(w["step_s"]) for w in workers)
        busiest = max(max(found.values()) for found in links.values())
        return {
            "name": configuration.name(args.workers),
            **vars(configuration),
            "megabytes": self._megabytes,
            "steps": min(steps),
            "step_s": step_s,
            "median_step_s": statistics.median(t for w in workers for t in w["step_s"]),
            "epoch_s": step_s * args.samples / (args.batch * args.workers),
            "busiest_link_bytes": busiest,
            "link_bytes": links,
            "cpu_s": cpu,
            "exchanges": sum(worker.get("exchanges", 0) for worker in workers),
            "steps_per_exchange": 1 / often if often else None,
            "late": sum(worker.get("late", 0) for worker in workers),
        }


class Results:
    """The rows, and the file that keeps them; what it holds already is not run again."""

    def __init__(self, args: argparse.Namespace) -> None:
        names = ("hosts", "workers", "batch", "samples", "lazy")
        self._path, self._about = args.output, {name: getattr(args, name) for name in names}
        self._rows: List[Dict[str, Any]] = []
        self._runs: List[Dict[str, Any]] = []
        if args.output is not None and args.output.exists():
            known = json.loads(args.output.read_text())
            other = {name: known[name] for name in names if known[name] != self._about[name]}
            if other:
                raise SystemExit(f"{args.output} is of {other}; give another --output")
            self._rows, self._runs = known["rows"], known["runs"]
        self._runs.append(describe())

    def has(self, start: Dict[str, Any], repeats: int) -> bool:
        """Whether there are as many rows that say what `start` says."""
        return sum(start.items() <= row.items() for row in self._rows) >= repeats

    def add(self, row: Dict[str, Any]) -> None:
        """Show a row and keep it, with the index of the run that made it."""
        self._rows.append({**row, "run": len(self._runs) - 1})
        print(_row(row), flush=True)
        if self._path is not None:
            write(self._path, {"runs": self._runs, **self._about, "rows": self._rows})


def main() -> None:
    """Run all configurations that the file does not hold yet."""
    args = arguments()
    results = Results(args)
    for rate in args.rates:
        with Cluster(Network(args.hosts, rate)) as cluster:
            for megabytes in args.megabytes:
                bench = Bench(args, cluster, megabytes)
                for configuration in configurations(args):
                    start = {"rate": rate, "megabytes": megabytes, **vars(configuration)}
                    while not results.has(start, args.repeats):
                        results.add({**start, **bench.run(configuration)})


def _row(row: Dict[str, Any]) -> str:
    cpu = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in row["cpu_s"].items())
    steps = row["steps_per_exchange"]
    often = f"; {steps:.1f} steps an exchange" if steps else ""
    return (
        f"{row['rate']:>8} {row['megabytes']:5g} MB  {row['name']:16}{row['clients']:3} client(s)"
        f"{row['servers']:3} server(s){row['step_s']:9.3f} s a step{row['epoch_s']:8.0f} s an epoch"
        f"{row['busiest_link_bytes'] / 1e6:8.1f} MB; CPU s a step: {cpu}{often}"
    )


if __name__ == "__main__":
    main()
