"""Tables and pictures of what `epoch.py` wrote.

    python benchmarks/epoch_report.py results/epoch.json --output epoch.png

(pictures need matplotlib) prints a table in Markdown: time of a step and an epoch, how many times
as fast as MXNet's own ``dist_sync`` with as many servers, bytes on the busiest link, and work of
the processes.
"""

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from common import grouped, report

Row = Dict[str, Any]
RULES = ["alone", "dist_sync", "dist_async", "sgd", "asgd", "esgd"]
COLOURS = {"sgd": "tab:blue", "asgd": "tab:green", "esgd": "tab:red"}


def groups(results: Dict[str, Any]) -> Dict[str, List[Row]]:
    """Return the rows by network and size of the model, in the order of RULES."""
    ordered = sorted(results["rows"], key=_order)
    found = grouped(ordered, "megabytes", "rate")
    return {f"{megabytes:g} MB, {rate}": rows for (megabytes, rate), rows in found.items()}


def _order(row: Row) -> Tuple[int, int, int]:
    return row["servers"] or 1, RULES.index(row["rule"]), -row["clients"]


def _name(row: Row) -> str:
    return "MPI" if row["clients"] == 1 else str(row["name"])


def times_as_fast(row: Row, rows: List[Row]) -> Optional[float]:
    """Return how many times as fast as ``dist_sync`` with as many servers."""
    servers = row["servers"] or 1  # one client needs none: it is held against one server
    same = [r for r in rows if r["rule"] == "dist_sync" and r["servers"] == servers]
    return same[0]["step_s"] / row["step_s"] if same and row["rule"] != "alone" else None


def table(results: Dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    lines = []
    for title, rows in groups(results).items():
        lines += ["", f"**{title}**", "", "| | clients | servers | s a step | min an epoch | x |"]
        lines[-1] += (
            " MB on the busiest link | CPU s a step: workers, servers, agents | steps an exchange |"
        )
        lines.append("|---|---|---|---|---|---|---|---|---|")
        lines += [_line(row, rows) for row in rows]
    return "\n".join(lines[1:])


def _line(row: Row, rows: List[Row]) -> str:
    ratio = times_as_fast(row, rows)
    cpu = ", ".join(f"{row['cpu_s'][kind]:.2f}" for kind in ("workers", "servers", "agents"))
    cells = [_name(row), row["clients"], row["servers"], f"{row['step_s']:.2f}"]
    cells += [f"{row['epoch_s'] / 60:.1f}", "" if ratio is None else f"{ratio:.1f}"]
    cells += [f"{row['busiest_link_bytes'] / 1e6:.1f}", cpu, _often(row)]
    return "| " + " | ".join(map(str, cells)) + " |"


def _often(row: Row) -> str:
    """Every how many steps there was an exchange, where that is not said by the rule."""
    often = row.get("steps_per_exchange")
    return f"{often:.0f}" if often else ""


def plot(results: Dict[str, Any], path: Path) -> None:
    """Draw the epoch's time of each configuration as a bar, all networks on one axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = groups(results)
    counts = [len(rows) for rows in found.values()]
    figure, axes = pyplot.subplots(
        len(found),
        figsize=(7.5, 0.36 * sum(counts) + 1.2 * len(found) + 0.3),
        sharex=True,
        squeeze=False,
        height_ratios=counts,
        layout="constrained",
    )
    for (title, rows), axis in zip(found.items(), axes[:, 0]):
        rows = rows[::-1]
        labels = [
            f"{_name(r)}, {r['clients']} client{'s' * (r['clients'] > 1)}, "
            f"{r['servers']} server{'s' * (r['servers'] != 1)}"
            + (f"\n(an exchange every {_often(r)} steps)" if _often(r) else "")
            for r in rows
        ]
        minutes = [r["epoch_s"] / 60 for r in rows]
        bars = axis.barh(
            range(len(rows)), minutes, color=[COLOURS.get(r["rule"], "grey") for r in rows]
        )
        axis.bar_label(bars, [f" {m:.1f}" for m in minutes], fontsize=8)
        axis.set_yticks(range(len(rows)), labels, fontsize=8)
        axis.set_xscale("log")
        axis.margins(x=0.15, y=0.01)
        axis.set_title(f"{title}, {results['workers']} workers on {results['hosts']} hosts")
    axes[-1, 0].set_xlabel(f"minutes for an epoch of {results['samples']:,} samples")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    report(__doc__, table, plot)
