"""Allreduce and broadcast between hosts: how long, and how much over each link.

    python benchmarks/cluster_allreduce.py --output benchmarks/results/cluster-allreduce.json

makes a cluster of namespaces (`cluster.py`, needs root), starts one client over all of its hosts,
and compares the library's algorithms with what the MPI library itself does. Every contestant has
its turn in each round; times are medians over rounds, of the slowest rank; bytes are those that
the busiest host sends, read from its interface, over what is needed: ``2 (N - 1) / N`` vectors for
an allreduce over N hosts, one for a broadcast.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Dict, List

from cluster import Cluster, Network
from cluster_job import launch
from common import describe, write

CONTESTANTS = {
    "allreduce": ("hierarchical", "ring", "library"),
    "broadcast": ("hierarchical", "chain", "library"),
}
WORKER = Path(__file__).with_name("cluster_allreduce_worker.py")
LIMIT_S = 900.0
_Raw = argparse.RawDescriptionHelpFormatter


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.25, 4.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one host pair, rate, size and round")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    args = parser.parse_args()
    if args.quick:
        args.hosts, args.rates, args.megabytes, args.rounds = [2], ["100mbit"], [0.5], 1
    return args


def summary(rows: List[Dict[str, Any]], hosts: int, rate: str) -> List[Dict[str, Any]]:
    """Return one row for each contestant and size: medians, and ratios to what is needed."""
    made = []
    for key in dict.fromkeys((r["collective"], r["megabytes"], r["algorithm"]) for r in rows):
        collective, megabytes, algorithm = key
        mine = [r for r in rows if (r["collective"], r["megabytes"], r["algorithm"]) == key]
        needed = megabytes * 1e6 * (2 * (hosts - 1) / hosts if collective == "allreduce" else 1)
        seconds = statistics.median(r["seconds"] for r in mine)
        sent = statistics.median(r["sent_bytes"] for r in mine)
        row = {"hosts": hosts, "rate": rate, "collective": collective, "megabytes": megabytes}
        row.update(algorithm=algorithm, seconds=seconds, rounds=[r["seconds"] for r in mine])
        row.update(sent_bytes=sent, over_needed=sent / needed)
        made.append(row)
    for row in made:
        other = next(
            r
            for r in made
            if r["algorithm"] == "library"
            and (r["collective"], r["megabytes"]) == (row["collective"], row["megabytes"])
        )
        row["times_as_fast_as_library"] = other["seconds"] / row["seconds"]
    return made


def main() -> None:
    """Run all, print the table, write the file."""
    args = arguments()
    rows: List[Dict[str, Any]] = []
    for rate in args.rates:
        for hosts in args.hosts:
            task = {"megabytes": args.megabytes, "rounds": args.rounds, "contestants": CONTESTANTS}
            with tempfile.TemporaryDirectory(prefix="allreduce-") as folder:
                task["folder"] = folder
                with Cluster(Network(hosts, rate)) as cluster:
                    launch(cluster, hosts * args.ranks, {"--servers": 0}, WORKER, task, LIMIT_S)
                found = json.loads(Path(folder, "rows.json").read_text())
            made = summary(found, hosts, rate)
            rows += made
            print("\n".join(map(_said, made)), flush=True)
            if args.output:
                write(args.output, {**describe(), "ranks_per_host": args.ranks, "rows": rows})


def _said(row: Dict[str, Any]) -> str:
    return (
        f"{row['hosts']} hosts {row['rate']:>8} {row['collective']:10}{row['megabytes']:6g} MB "
        f"{row['algorithm']:13}{row['seconds'] * 1e3:9.1f} ms, sends {row['over_needed']:.2f} of "
        f"what is needed, {row['times_as_fast_as_library']:.2f} times as fast as library"
    )


if __name__ == "__main__":
    main()
