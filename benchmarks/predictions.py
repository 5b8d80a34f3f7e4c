"""How good `gluon_esgd.predict` is: fitted to some files of `epoch.py`, compared with others.

    python benchmarks/predictions.py --fit 1-host.json 2-hosts.json 4-hosts.json \\
        --held-back 6-hosts.json --output benchmarks/results/predictions.json --plot predictions.png

Every file must hold a row of rule "alone", which says what computing takes. Without --fit the
model's own constants are used.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Sequence

from common import describe, write

from gluon_esgd.predict import (
    Calibration,
    Cluster,
    Configuration,
    Measurement,
    Residual,
    Work,
    calibrate,
    compare,
)

UNITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}
ERRORS = ("step_error", "bytes_error")
TARGET = 0.2  # of step times, held back


def measurements(path: Path) -> List[Measurement]:
    """Return what a file of `epoch.py` holds, as the model takes it."""
    results = json.loads(path.read_text())
    made = []
    for row in results["rows"]:
        if row["rule"] == "alone":
            continue
        made.append(_measurement(results, row))
    return made


def _measurement(results: Dict[str, Any], row: Dict[str, Any]) -> Measurement:
    alone = [
        r["step_s"]
        for r in results["rows"]
        if r["rule"] == "alone" and r["megabytes"] == row["megabytes"]
    ]
    rate = float(row["rate"][:-4]) * UNITS[row["rate"][-4:]]
    hosts, workers = results["hosts"], results["workers"]
    cluster = Cluster(hosts, workers // hosts, rate, cores=os.cpu_count())
    work = Work(row["megabytes"] * 1e6, min(alone), results["batch"], results["samples"])
    stock = row["rule"].startswith("dist_")
    configuration = Configuration(
        row["rule"],
        workers,
        row["clients"],
        row["servers"],
        None if stock or row["rule"] == "sgd" else row["interval"],
        lazy=min(results["lazy"], row["interval"]),
    )
    crossed = row["busiest_link_bytes"] or None  # nothing leaves a single host
    return Measurement(configuration, work, cluster, row["step_s"], crossed)


def lines(residuals: Sequence[Residual]) -> List[Dict[str, Any]]:
    """Return what is printed and written of each comparison."""
    return [
        {
            "rule": r.measurement.configuration.rule,
            "clients": r.measurement.configuration.clients,
            "servers": r.measurement.configuration.servers,
            "hosts": r.measurement.cluster.hosts,
            "megabytes": r.measurement.work.parameter_bytes / 1e6,
            "megabits": r.measurement.cluster.link_bytes_per_s / 125e3,
            "measured_s": r.measurement.step_s,
            "predicted_s": r.predicted_s,
            "step_error": r.step_error,
            "bytes_error": r.bytes_error,
        }
        for r in residuals
    ]


def show(title: str, rows: Sequence[Dict[str, Any]]) -> None:
    """Print them as a table in Markdown."""
    within = sum(abs(row["step_error"]) <= TARGET for row in rows)
    print(f"**{title}**: {within} of {len(rows)} within {TARGET:.0%}\n")
    print("| hosts | Mbit/s | MB | rule | clients | servers | s a step | predicted | | bytes |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        size = [row["hosts"], f"{row['megabits']:g}", f"{row['megabytes']:g}"]
        kind = [row["rule"], row["clients"], row["servers"]]
        times = [f"{row[key]:.3g}" for key in ("measured_s", "predicted_s")]
        errors = [f"{row[k]:+.0%}" if row[k] is not None else "" for k in ERRORS]
        print("| " + " | ".join(map(str, [*size, *kind, *times, *errors])) + " |")
    print()


def plot(fitted: Sequence[Dict[str, Any]], held: Sequence[Dict[str, Any]], path: Path) -> None:
    """Draw predicted over measured steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 6), layout="constrained")
    for name, rows, mark in (("fitted", fitted, "x"), ("held back", held, "o")):
        xs, ys = ([row[key] for row in rows] for key in ("measured_s", "predicted_s"))
        axes.plot(xs, ys, mark, label=name, alpha=0.8)
    least, most = (f(row["measured_s"] for row in [*fitted, *held]) for f in (min, max))
    ends = [0.7 * least, 1.4 * most]
    axes.plot(ends, ends, color="grey", linewidth=1)
    for factor in (1 - TARGET, 1 + TARGET):
        axes.plot(ends, [factor * end for end in ends], color="grey", linewidth=0.7, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="measured, s a step", ylabel="predicted, s a step")
    axes.set_title(f"step times; dashed: {TARGET:.0%} off")
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Fit, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--fit", type=Path, nargs="*", default=[])
    parser.add_argument("--held-back", type=Path, nargs="+", required=True)
    parser.add_argument("--constants", type=Path, help="file for `gluon-esgd plan --calibration`")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    parser.add_argument("--plot", type=Path, help="PNG; pip install matplotlib")
    args = parser.parse_args()
    rows = [row for path in args.fit for row in measurements(path)]
    held = [row for path in args.held_back for row in measurements(path)]
    found = calibrate(rows) if rows else Calibration(held[0].cluster.constants, ())
    fitted, compared = lines(found.residuals), lines(compare(held, found.constants))
    if fitted:
        show("fitted", fitted)
    show("held back", compared)
    print(found.constants)
    if args.constants is not None:
        found.write(str(args.constants))
    if args.output is not None:
        result = {"constants": vars(found.constants), "fitted": fitted, "held_back": compared}
        write(args.output, {**describe(), **result})
    if args.plot is not None:
        plot(fitted, compared, args.plot)


_Raw = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
