"""Tables and pictures of what `cluster_allreduce.py` wrote.

    python benchmarks/cluster_allreduce_report.py cluster-allreduce.json --output all.png

(pictures need matplotlib) prints a table in Markdown for each collective: for each algorithm the
median time, bytes that the busiest host sends over what is needed, and how many times as fast it
is as the MPI library.
"""

from pathlib import Path
from typing import Any, Dict, List

from common import grouped, report

Row = Dict[str, Any]
COLOURS = {"hierarchical": "tab:red", "ring": "tab:blue", "chain": "tab:green", "library": "grey"}


def table(results: Dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    lines: List[str] = []
    for (collective,), rows in grouped(results["rows"], "collective").items():
        algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
        lines += ["", f"**{collective}**: ms, bytes over what is needed, times as fast as library"]
        lines += ["", "| hosts | rate | MB | " + " | ".join(algorithms) + " |"]
        lines.append("|---" * (3 + len(algorithms)) + "|")
        for start, same in grouped(rows, "hosts", "rate", "megabytes").items():
            cells = [f"{value:g}" if isinstance(value, float) else value for value in start]
            lines.append("| " + " | ".join(map(str, [*cells, *map(_cell, same)])) + " |")
    return "\n".join(lines[1:])


def _cell(row: Row) -> str:
    ratio = row["times_as_fast_as_library"]
    return f"{row['seconds'] * 1e3:.0f}, {row['over_needed']:.2f}, {ratio:.2f}"


def plot(results: Dict[str, Any], path: Path) -> None:
    """Draw times as fast as the library over the size, a picture for each collective and rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictures = grouped(results["rows"], "collective", "rate")
    figure, axes = pyplot.subplots(
        1, len(pictures), figsize=(4.2 * len(pictures), 4.2), sharey=True, layout="constrained"
    )
    for (title, rows), axis in zip(pictures.items(), axes):
        for (algorithm, hosts), line in grouped(rows, "algorithm", "hosts").items():
            axis.plot(
                [row["megabytes"] for row in line],
                [row["times_as_fast_as_library"] for row in line],
                "o-" if hosts == max(row["hosts"] for row in rows) else "x--",
                color=COLOURS[algorithm],
                label=f"{algorithm}, {hosts} hosts",
            )
        sizes = sorted({row["megabytes"] for row in rows})
        axis.set(xscale="log", xlabel="MB", title=", ".join(title))
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="lower right")
    library = "Open MPI" if "openmpi" in results["versions"] else "MPICH"
    axes[0].set_ylabel(f"times as fast as {library}")
    axes[0].set_ylim(0, None)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    report(__doc__, table, plot)
