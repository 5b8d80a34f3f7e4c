"""Tables and pictures of what `convergence.py` wrote.

    python benchmarks/convergence_report.py two-tier.json --output two-tier.png

(pictures need matplotlib) prints tables in Markdown: what was chosen, time and samples to the
target, accuracy at the end and after as many samples each, staleness; and the sweeps.
"""

from pathlib import Path
from statistics import mean, median
from typing import Any, Dict, List

import numpy as np
from common import report

Trial = Dict[str, Any]
COLOURS = {"SGD": "tab:blue", "ASGD": "tab:green", "ESGD": "tab:red", "MPI": "black"}


def table(found: Dict[str, Any]) -> str:
    """Return what each algorithm came to, as Markdown."""
    target = f"{found['target']:.0%}"
    lines = [
        f"| | learning rate, interval | s to {target} | samples to {target} | at the end "
        "| as many samples each | ms a step | others' exchanges between own |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.get("run", {}).items():
        trials = runs["trials"]
        chosen = found["tune"][name]["chosen"]
        last = median(t["center"][-1]["accuracy"] for t in trials)
        final = found.get("final", {}).get(name)
        cells = [name, ", ".join(f"{value:g}" for value in chosen.values())]
        cells += [_median(trials, "target_s", ".1f"), _median(trials, "target_samples", ",.0f")]
        cells += [f"{last:.1%}", "" if final is None else _final(final["trials"])]
        cells.append(f"{median(1e3 * t['seconds'] / t['steps'] for t in trials):.0f}")
        cells.append(_mean(trials, "others_between"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _median(trials: List[Trial], name: str, form: str) -> str:
    """The median where more than half have come there; else how many have."""
    values = [t[name] for t in trials if t[name] is not None]
    if 2 * len(values) <= len(trials):
        return f"not ({len(values)} of {len(trials)})"
    unreached = [float("inf")] * (len(trials) - len(values))
    return format(median([*values, *unreached]), form)


def _final(trials: List[Trial]) -> str:
    last = [t["center"][-1]["accuracy"] for t in trials]
    return f"{median(last):.1%} ({min(last):.1%} to {max(last):.1%})"


def _mean(trials: List[Trial], name: str) -> str:
    values = [t[name] for t in trials if t[name] is not None]
    return f"{mean(values):.1f}" if values else ""


def sweeps(found: Dict[str, Any]) -> str:
    """Return what was varied, as Markdown."""
    lines = ["| | | s to the target | at the end | samples | others' exchanges between own |"]
    lines.append("|---|---|---|---|---|---|")
    for name, rows in found.get("sweep", {}).items():
        for row in rows["trials"]:
            value = row[name]["momentum"] if name == "outer" else row[name]
            reached = "not" if row["target_s"] is None else f"{row['target_s']:.1f}"
            last = row["center"][-1]
            cells = [name, f"{value:g}", reached, f"{last['accuracy']:.1%}"]
            cells += [f"{last['samples']:,}", _mean([row], "others_between")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(found: Dict[str, Any], path: Path) -> None:
    """Draw accuracy over time and over samples, the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5.5), sharey=True, layout="constrained")
    for axis, kind in zip(axes, ("seconds", "samples")):
        for name, runs in found["run"].items():
            xs, ys = _together(runs["trials"], kind)
            style = "-" if name.startswith("mpi") else ":" if name == "MPI" else "--"
            axis.plot(xs, ys, style, color=COLOURS[name.split("-")[-1]], label=name)
        axis.axhline(found["target"], color="grey", linewidth=0.7)
        axis.set_xlabel("seconds of training" if kind == "seconds" else "samples, all workers")
        axis.grid(alpha=0.3)
    axes[1].set_xscale("log")
    axes[0].set_ylabel("accuracy of the center on test pictures")
    axes[0].set_ylim(0.6, None)
    seeds = len(next(iter(found["run"].values()))["trials"])
    axes[1].legend(title=f"mean of {seeds} seeds")
    figure.suptitle(f"network: {found['about']['run']['network']}")
    figure.savefig(path, dpi=110)


def _together(trials: List[Trial], kind: str) -> Any:
    """Return the mean curve over what all trials cover."""
    curves = [([look[kind] for look in t["center"]], t["center"]) for t in trials]
    xs = np.linspace(max(c[0][0] for c in curves), min(c[0][-1] for c in curves), 60)
    ys = [np.interp(xs, x, [look["accuracy"] for look in looks]) for x, looks in curves]
    return xs, np.mean(ys, axis=0)


if __name__ == "__main__":
    report(__doc__, lambda found: f"{table(found)}\n\n{sweeps(found)}", plot)
