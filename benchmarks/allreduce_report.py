"""Figures, table, targets and plot of `allreduce.py`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np

__all__ = ["can_plot", "figures", "plot", "text"]

Row = Dict[str, Any]
K, M = 1 << 10, 1 << 20

LABELS = {
    "once": "auto, checked each time",
    "staged": "shared, private vector",
    "mpi_allreduce": "MPI_Allreduce",
    "sendrecv_ring": "Sendrecv ring",
    "gloo": "Gloo",
    "horovod": "Horovod",
    "packing": "pack + unpack, ResNet-50",
}
# Ranks, ours, other, size, how many times as fast ours is to be.
TARGETS = [
    (2, "auto", "mpi_allreduce", 64 * K, 0.9),
    (2, "auto", "mpi_allreduce", 1 * M, 2.0),
    (2, "auto", "mpi_allreduce", 16 * M, 2.0),
    (2, "auto", "mpi_allreduce", 100 * M, 3.5),
    (2, "auto", "horovod", 100 * M, 4.0),
    (2, "auto", "gloo", 100 * M, 4.0),
    (2, "shared", "copy", 16 * M, 0.9),
    (2, "shared", "copy", 100 * M, 0.9),
    (4, "auto", "mpi_allreduce", 16 * M, 2.0),
    (4, "auto", "mpi_allreduce", 100 * M, 2.0),
]
SMALL, SMALL_EXTRA_US = 4 * K, 2.0
DEVICE_TARGET, DEVICE_FROM = 0.85, 100 * M


def figures(rows: List[Row], vectors: int) -> List[Row]:
    """Add to the rows what follows from their times: `vectors` take part in each allreduce.

    GB/s are 10^9 bytes a second. As nccl-tests defines them, algbw is size / time and busbw is
    algbw x 2 (n - 1) / n; for a copy too, so that ratios between rows hold.
    """
    made = []
    for row in rows:
        low, median, high = np.percentile(row["rounds_us"], [25, 50, 75])
        algbw = row["bytes"] / median / 1e3
        packing = row["contestant"] == "packing"
        busbw = None if packing else algbw * 2 * (vectors - 1) / vectors
        times = {"median_us": median, "quartiles_us": [low, high], "algbw": algbw, "busbw": busbw}
        made.append({**row, **times})
    for row in made:
        for name, key in (("mpi_allreduce", "x_mpi_allreduce"), ("copy", "x_copy")):
            ratio = _ratio(made, row["contestant"], name, row["bytes"])
            row[key] = ratio
    return made


def text(result: Dict[str, Any]) -> str:
    """Return the table, the targets and what has to be known about both."""
    lines = [*_head(result)]
    for nbytes in sorted({row["bytes"] for row in result["rows"]}):
        lines += ["", *_table(result, nbytes)]
    reached = list(_targets(result))
    return "\n".join([*lines, *(["", "targets", *reached] if reached else [])])


def _head(result: Dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    yield f"{result['machine']}; {versions}"
    place = "GPUs" if result["memory"] == "device" else "host memory"
    under = f" under {result['mpi']}" if result["mpi"] else ""
    bound = "each bound to one core" if result["bound"] else "not bound to cores"
    yield f"{result['ranks']} rank(s){under}, {bound}; {result['dtype']} in {place}; sum"
    if result["ranks"] > result["cores"]:
        yield f"{result['ranks']} ranks share {result['cores']} cores"
    if result["nodes"]:
        yield f"nodes are declared, of {result['nodes']} ranks; messages between them cross no wire"
    if any(row["contestant"] == "horovod" for row in result["rows"]):
        cycle = result["environment"]["HOROVOD_CYCLE_TIME"]
        idle = ", and gives up its core while it waits" if result["mpi"] == "openmpi" else ""
        yield f"Horovod looks for work every {cycle} ms instead of every ms{idle}"
    for name, why in result["left_out"].items():
        yield f"left out: {name}: {why}"


def _table(result: Dict[str, Any], nbytes: int) -> Iterator[str]:
    device = result["memory"] == "device"
    yield (
        f"{_size(nbytes):<26}{'us':>12}{'quartiles':>22}{'algbw':>9}{'busbw':>9}"
        + ("" if device else f"{'x MPI':>9}")
        + f"{'x copy':>9}"
        + (f"{'GB/s moved':>12}" if device else "")
    )
    rows = [row for row in result["rows"] if row["bytes"] == nbytes]
    for row in rows:
        low, high = row["quartiles_us"]
        spread = f"{low:,.1f}..{high:,.1f}"
        line = f"{_label(row):<26}{row['median_us']:>12,.1f}{spread:>22}"
        line += f"{row['algbw']:>9.2f}{_figure(row['busbw']):>9}"
        line += "" if device else f"{_figure(row['x_mpi_allreduce']):>9}"
        line += f"{_figure(row['x_copy']):>9}"
        if device:  # at least: each vector is read once and written once
            line += f"{2 * result['vectors'] * row['algbw']:>12.1f}"
        yield line


def _targets(result: Dict[str, Any]) -> Iterator[str]:
    rows = result["rows"]
    on_one_machine = result["memory"] == "host" and not result["nodes"]
    for ranks, ours, other, nbytes, target in TARGETS if on_one_machine else ():
        ratio = _ratio(rows, ours, other, nbytes)
        if ranks == result["ranks"] and ratio is not None:
            yield f"{ours} / {LABELS.get(other, other)} at {_size(nbytes)}: {_told(ratio, target)}"
    auto, mpi = (_find(rows, name, SMALL) for name in ("auto", "mpi_allreduce"))
    if auto and mpi and result["ranks"] == 2 and on_one_machine:
        more = auto["median_us"] - mpi["median_us"]
        missed = "  MISSED" if more > SMALL_EXTRA_US else ""
        yield (
            f"auto - MPI_Allreduce at {_size(SMALL)}: {more:+.1f} us "
            f"(target at most {SMALL_EXTRA_US:+.1f}){missed}"
        )
    for row in rows:
        if "bytes_sent_by_node" in row:
            n = len(row["bytes_sent_by_node"])
            least = 2 * (n - 1) / n * row["bytes"]
            sent = ", ".join(f"{s:,}" for s in row["bytes_sent_by_node"])
            yield (
                f"hierarchical at {_size(row['bytes'])}: nodes send {sent} bytes "
                f"(target 2 (N - 1) / N x size = {least:,.0f})"
            )
        if row["contestant"] == "cuda" and row["bytes"] >= DEVICE_FROM:
            yield f"cuda / copy at {_size(row['bytes'])}: {_told(row['x_copy'], DEVICE_TARGET)}"


def _told(ratio: float, target: float) -> str:
    return f"{ratio:.2f}x (target {target}){'' if ratio >= target else '  MISSED'}"


def _find(rows: List[Row], name: str, nbytes: int) -> Optional[Row]:
    return next((r for r in rows if (r["contestant"], r["bytes"]) == (name, nbytes)), None)


def _ratio(rows: List[Row], ours: str, other: str, nbytes: int) -> Optional[float]:
    """How many times as fast `ours` is."""
    mine, theirs = _find(rows, ours, nbytes), _find(rows, other, nbytes)
    return theirs["median_us"] / mine["median_us"] if mine and theirs else None


def _label(row: Row) -> str:
    name: str = row["contestant"]
    took = row["took"] or name
    as_named = took == name or (name, took) == ("staged", "shared")
    return LABELS.get(name, name) + ("" if as_named else f": {took}")


def _figure(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.2f}"


def _size(nbytes: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if nbytes < 1024 or unit == "MB":
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    raise AssertionError


def can_plot() -> bool:
    """Whether this interpreter has matplotlib."""
    return find_spec("matplotlib") is not None


def plot(result: Dict[str, Any], path: Path) -> None:
    """Draw busbw by size, one line for each contestant that all sizes have, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    rows = [row for row in result["rows"] if row["contestant"] != "packing"]
    for name, style in _styles(rows):
        mine = [row for row in rows if row["contestant"] == name]
        sizes, speeds = [r["bytes"] for r in mine], [r["busbw"] for r in mine]
        axes.loglog(sizes, speeds, label=_label({**mine[0], "took": None}), **style)
    ticks = sorted({row["bytes"] for row in rows})
    axes.set_xticks(ticks, [_size(t) for t in ticks])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    steps = [s * 10.0**e for e in range(-4, 5) for s in (1, 2, 5)]
    axes.set_yticks(
        [s for s in steps if low <= s <= high], [f"{s:g}" for s in steps if low <= s <= high]
    )
    axes.set(xlabel="size of the vector", ylabel="busbw, GB/s")
    under = f" under {result['mpi']}" if result["mpi"] else ""
    axes.set_title(f"allreduce, {result['dtype']}, {result['ranks']} rank(s){under}, median")
    axes.grid(True, alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _styles(rows: List[Row]) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """Name and style of each: ours solid and full, peers dashed and hollow, limits dotted.

    Colours are Okabe and Ito's, which all eyes tell apart; markers differ as well.
    """
    colors = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]
    seen: Dict[str, str] = {row["contestant"]: row["kind"] for row in rows}
    own = [name for name, kind in seen.items() if kind == "own"]
    peers = [name for name, kind in seen.items() if kind == "peer"]
    for k, name in enumerate(own):
        width = 2.5 if name == "auto" else 1.5
        yield name, {"color": colors[k % 6], "marker": "osD^vPX"[k % 7], "linewidth": width}
    for k, name in enumerate(peers):
        style = {"color": colors[(k + 1) % 6], "marker": "osD^"[k % 4], "linestyle": "--"}
        yield name, {**style, "fillstyle": "none", "markersize": 9}
    for name in seen:
        if name not in own + peers:
            yield name, {"color": "black", "linestyle": ":", "linewidth": 2}
