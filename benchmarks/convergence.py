"""Accuracy against time and against samples, by each of the six algorithms, on slow links.

    python benchmarks/convergence.py tune --network two-tier --output two-tier.json
    python benchmarks/convergence.py extend --network two-tier --output two-tier.json
    python benchmarks/convergence.py run --network two-tier --output two-tier.json
    python benchmarks/convergence.py final --output two-tier.json
    python benchmarks/convergence.py sweep --network two-tier --output two-tier.json
    python benchmarks/convergence.py all --quick

A small convolutional network learns Fashion-MNIST (or what is found instead) on a cluster of
namespaces (`cluster.py`, needs root), and the center is tried on pictures that nobody trains on.

- `tune`: six trials of each algorithm, the same range of learning rates for all; the first to come
  to the target on held-back training pictures wins, or the one that ends closest to it.
- `extend`: where the rate that won is the outermost of those tried, the next one beyond it, twice
  at most.
- `run`: what won, with other seeds, on the test pictures: time and samples to the target.
- `final`: the same for as many samples each, on links that are not slow: what is it worth at last?
- `sweep`: intervals, moving rates, numbers of clients and momenta of the center, elastic, one
  after the other.

Stages write into one file; each takes what those before it have found there.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from cluster import Cluster, Network
from cluster_job import launch
from common import describe, write

WORKER = Path(__file__).with_name("convergence_worker.py")
TARGET = 0.87  # accuracy; chosen before any of this was run
HOSTS, RACKS = 4, 2  # two workers on each host, and a host more for the server
NETWORKS: Dict[str, Dict[str, Any]] = {
    "one-rate": {"rate": "100mbit", "server_rate": "100mbit"},
    "two-tier": {"rate": "1gbit", "racks": RACKS, "uplink": "100mbit", "server_rate": "100mbit"},
    "fast": {"rate": "10gbit", "server_rate": "10gbit"},
}
FINAL_NETWORK = "fast"
# Rule and clients; None: every worker is one. The last stands beside the paper's six.
ALGORITHMS: Dict[str, Tuple[str, Optional[int]]] = {
    **{f"dist-{rule.upper()}": (rule, None) for rule in ("sgd", "asgd", "esgd")},
    **{f"mpi-{rule.upper()}": (rule, RACKS) for rule in ("sgd", "asgd", "esgd")},
    "MPI": ("sgd", 1),
}
RATES = (0.02, 0.06, 0.2)
FINER_RATES = (0.02, 0.035, 0.06, 0.1, 0.2, 0.35)  # where there is no interval to choose
INTERVALS = {"asgd": (1, 4), "esgd": (16, 64)}
CHOSEN = ("lr", "interval")  # what tuning chooses
EXTENSIONS = 2
TUNE_SEED, SEEDS = 0, (1, 2, 3)
SIZES = ("batch", "train", "validation", "test")
LIMIT_S = 1800.0

Trial = Dict[str, Any]
_Raw = argparse.RawDescriptionHelpFormatter


def arguments(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--network", choices=NETWORKS, default="two-tier")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--tune-seconds", type=float, default=30.0, help="of training in a trial")
    parser.add_argument("--seconds", type=float, default=60.0, help="the same of run")
    parser.add_argument("--sweep-seconds", type=float, default=30.0, help="the same of sweep")
    parser.add_argument("--epochs", type=int, default=6, help="of final")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--batch", type=int, default=32, help="of each worker")
    parser.add_argument("--quick", action="store_true", help="seconds, one algorithm")
    parser.add_argument("--output", type=Path, help="file that stages read and write, JSON")
    args = parser.parse_args(argv)
    args.hosts, args.train, args.validation, args.test = HOSTS, 55_000, 5_000, 10_000
    if args.quick:
        args.algorithms, args.seeds, args.epochs, args.hosts = ["mpi-ESGD"], [1], 1, 2
        args.tune_seconds = args.seconds = args.sweep_seconds = 1.0
        args.train, args.validation, args.test = 1_000, 200, 200
    return args


def trials(rule: str, seconds: float) -> List[Trial]:
    """Return the six that each algorithm may choose from."""
    common = {"seed": TUNE_SEED, "seconds_limit": seconds}
    if rule == "sgd":
        return [{"lr": rate, **common} for rate in FINER_RATES]
    pairs = [(rate, interval) for rate in RATES for interval in INTERVALS[rule]]
    return [{"lr": rate, "interval": interval, **common} for rate, interval in pairs]


def beyond(rows: List[Trial]) -> Optional[Trial]:
    """Return the trial that follows where the best one has an outermost learning rate."""
    best, rates = min(rows, key=_merit), sorted({row["lr"] for row in rows})
    if best["lr"] not in (rates[0], rates[-1]):
        return None
    ratio = rates[1] / rates[0] if best["lr"] == rates[0] else rates[-2] / rates[-1]
    again = {key: best[key] for key in (*CHOSEN, "seed", "seconds_limit") if key in best}
    return {**again, "lr": float(f"{best['lr'] / ratio:.2g}")}


class Stages:
    """What was found so far, and how to go on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        known = args.output is not None and args.output.exists()
        self.found: Dict[str, Any] = json.loads(args.output.read_text()) if known else {}
        self.found.setdefault("target", TARGET)

    def tune(self) -> None:
        """Let each algorithm choose among six."""
        with self._cluster(self._args.network) as cluster:
            for name in self._args.algorithms:
                rule, clients = ALGORITHMS[name]
                wanted = trials(rule, self._args.tune_seconds)
                rows = self._job(cluster, rule, clients, wanted, "validation")
                self._choose(name, rows)

    def extend(self) -> None:
        """Go on beyond the ends of the grid where the best is there."""
        with self._cluster(self._args.network) as cluster:
            for name in self._args.algorithms:
                rows = self.found["tune"][name]["trials"]
                for _ in range(EXTENSIONS):
                    further = beyond(rows)
                    if further is None:
                        break
                    rows += self._job(cluster, *ALGORITHMS[name], [further], "validation")
                self._choose(name, rows)

    def _choose(self, name: str, rows: List[Trial]) -> None:
        best = min(rows, key=_merit)
        chosen = {key: best[key] for key in CHOSEN if key in best}
        self._note("tune", name, {"trials": rows, "chosen": chosen})
        print(f"{name:10} {chosen} of {len(rows)}: {_said(best)}", flush=True)

    def run(self) -> None:
        """Train by what was chosen, with other seeds."""
        with self._cluster(self._args.network) as cluster:
            for name in self._args.algorithms:
                self._seeds("run", cluster, name, {"seconds_limit": self._args.seconds})

    def final(self) -> None:
        """The same for a number of samples, whatever time they take."""
        with self._cluster(FINAL_NETWORK) as cluster:
            for name in self._args.algorithms:
                samples = self._args.epochs * self._args.train
                self._seeds("final", cluster, name, {"samples": samples})

    def _cluster(self, name: str) -> Cluster:
        return Cluster(Network(self._args.hosts, **NETWORKS[name]))

    def _seeds(self, stage: str, cluster: Cluster, name: str, limit: Trial) -> None:
        chosen = self.found["tune"][name]["chosen"]
        wanted = [{**chosen, **limit, "seed": seed} for seed in self._args.seeds]
        rows = self._job(cluster, *ALGORITHMS[name], wanted, "test")
        self._note(stage, name, {"trials": rows})
        for row in rows:
            print(f"{name:10} seed {row['seed']}: {_said(row)}", flush=True)

    def sweep(self) -> None:
        """Vary one thing at a time, under rule esgd with two clients."""
        chosen = self.found["tune"]["mpi-ESGD"]["chosen"]
        base = {**chosen, "seed": SEEDS[0], "seconds_limit": self._args.sweep_seconds}
        one_job: Dict[str, List[Trial]] = {
            "interval": [{**base, "interval": tau} for tau in (1, 4, 16, 64, 256)],
            "alpha": [{**base, "alpha": alpha} for alpha in (0.05, 0.15, 0.3, 0.45, 0.6)],
        }
        outer = [{**base, "outer": {"momentum": mu}} for mu in (0.3, 0.6, 0.9)]
        wanted = [trial for group in one_job.values() for trial in group]
        clients: Tuple[int, ...] = (1, 2, 4, 8)
        if self._args.quick:
            one_job, wanted, clients = {"interval": wanted[:1]}, wanted[:1], ()
            outer = outer[:1]
        with self._cluster(self._args.network) as cluster:
            rows = self._job(cluster, "esgd", 2, wanted, "test")
            for name, group in one_job.items():
                self._note("sweep", name, {"trials": rows[: len(group)]})
                rows = rows[len(group) :]
            # It belongs to the job: each has one of its own.
            rows = [
                row for trial in outer for row in self._job(cluster, "esgd", 2, [trial], "test")
            ]
            self._note("sweep", "outer", {"trials": rows})
            counts = []
            for count in clients:
                rule = "sgd" if count == 1 else "esgd"
                trial = {k: v for k, v in base.items() if count > 1 or k != "interval"}
                counts += self._job(cluster, rule, count, [trial], "test")
            self._note("sweep", "clients", {"trials": counts})
        for name, found in self.found["sweep"].items():
            for row in found["trials"]:
                said = row["clients"] if name == "clients" else row[name]
                print(f"{name} {said}: {_said(row)}", flush=True)

    def _job(
        self,
        cluster: Cluster,
        rule: str,
        clients: Optional[int],
        wanted: List[Trial],
        evaluate: str,
    ) -> List[Trial]:
        """Run a job that does the trials `wanted`; return what they gave."""
        workers = 2 * self._args.hosts
        clients = clients or workers
        sizes = {name: getattr(self._args, name) for name in SIZES}
        task = {"rule": rule, "trials": wanted, "evaluate": evaluate, **sizes}
        servers = 1 if clients > 1 else 0
        flags = {"--clients": clients, "--servers": servers, "--rule": rule}
        with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
            task["folder"] = folder
            launch(cluster, workers, flags, WORKER, task, LIMIT_S)
            rows = _lines(Path(folder, "trials.jsonl"))
            seen = [_lines(Path(folder, f"exchanges{k}.jsonl")) for k in range(clients)]
        for number, row in enumerate(rows):
            mine = [lines[number]["exchanges"] for lines in seen]
            row.update(clients=clients, target_s=_reached(row, "seconds"), **_staleness(mine))
            row["target_samples"] = _reached(row, "samples")
        return rows

    def _note(self, stage: str, name: str, found: Dict[str, Any]) -> None:
        """Keep what was found, and write it."""
        self.found.setdefault(stage, {})[name] = found
        network = FINAL_NETWORK if stage == "final" else self._args.network
        about = {**describe(), "network": network, "seconds": self._args.seconds}
        self.found.setdefault("about", {})[stage] = about
        if self._args.output is not None:
            write(self._args.output, self.found)


STAGES = ("tune", "extend", "run", "final", "sweep")


def _lines(path: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _reached(row: Trial, axis: str) -> Optional[float]:
    """Where on an axis the center first had the target, between two looks; None: never."""
    before = {"accuracy": 0.0, axis: 0.0}
    for look in row["center"]:
        if look["accuracy"] >= TARGET:
            share = (TARGET - before["accuracy"]) / (look["accuracy"] - before["accuracy"])
            return before[axis] + share * (look[axis] - before[axis])
        before = look
    return None


def _merit(row: Trial) -> Any:
    """The smaller the better: time to the target, else what is missing at the end."""
    last = row["center"][-1]["accuracy"]  # one that diverges may have been better in passing
    return (row["target_s"] is None, row["target_s"] or 1 - last)


def _staleness(exchanges: List[List[Any]]) -> Dict[str, Optional[float]]:
    """How many exchanges others made between two of a client's own, and how old its own were."""
    others = []
    for client, own in enumerate(exchanges):
        foreign = [when for k, e in enumerate(exchanges) if k != client for when, _ in e]
        times = [when for when, _ in own]
        others += [sum(a < t <= b for t in foreign) for a, b in zip(times, times[1:])]
    steps = [age for own in exchanges for _, age in own]
    mean = statistics.mean
    return {
        "others_between": mean(others) if others else None,
        "steps_old": mean(steps) if steps else None,
        "exchanges": len(steps),
    }


def _said(row: Trial) -> str:
    reached = f"{row['target_s']:.1f} s" if row["target_s"] is not None else "not"
    last = row["center"][-1]
    return (
        f"{TARGET:.0%} after {reached}; at the end {last['accuracy']:.2%}, {last['samples']:,} "
        f"samples in {last['seconds']:.1f} s"
    )


def main() -> None:
    """Do a stage, or all."""
    args = arguments()
    stages = Stages(args)
    for stage in STAGES if args.stage == "all" else [args.stage]:
        print(f"{stage}:", flush=True)
        getattr(stages, stage)()


if __name__ == "__main__":
    main()
