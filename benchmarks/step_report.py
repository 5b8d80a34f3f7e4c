"""The figures of `step.py`: ratios over rounds, hidden communication, memory, tables and plot."""

import os
from pathlib import Path
from statistics import mean, median
from typing import Any, Dict, List

__all__ = ["Results", "images_per_s", "measured", "plot", "show", "spread"]

# A contestant that must be so many times as fast as another one.
TARGETS = [("ours-1", "gluon-1", 0.99), ("ours-2", "gluon-2", 0.97), ("ours-2", "horovod-2", 1.0)]

_MOST_BEYOND = 0.1  # copies of the gradients; none, but for what a measurement blurs

Results = List[Dict[str, Any]]  # of the processes of one run, by number


def images_per_s(results: Results, batch: int) -> float:
    """Return the images per second of all processes together."""
    return sum(batch / result["step_s"] for result in results)


def spread(values: List[float]) -> Dict[str, Any]:
    """Return median, lowest and highest of `values`, one for each round."""
    return {"median": median(values), "low": min(values), "high": max(values), "rounds": values}


def measured(found: Dict[str, List[Results]], batch: int) -> Dict[str, Any]:
    """Return what the rounds say about each contestant, and its ratios to others."""
    speeds = {key: [images_per_s(r, batch) for r in runs] for key, runs in found.items()}
    sizes = {key: int(key.split("-")[1]) for key in found}

    def ratio(key: str, to: str, scale: float = 1) -> Dict[str, Any]:
        return spread([a / (scale * b) for a, b in zip(speeds[key], speeds[to])])

    targets = [*TARGETS, *((f"ours-{n}", f"gluon-{n}", None) for n in sizes.values() if n > 2)]
    ratios = {
        f"{key} / {to}": {"target": target, **ratio(key, to)}
        for key, to, target in targets
        if key in found and to in found
    }
    efficiency = {
        key: ratio(key, "gluon-1", min(n, os.cpu_count() or n))
        for key, n in sizes.items()
        if n > 1 and "gluon-1" in found
    }
    return {
        "images_per_s": {key: spread(values) for key, values in speeds.items()},
        "ratios": ratios,
        "scaling_efficiency": efficiency,
        "collectives": {k: _hidden(runs, found, k) for k, runs in found.items() if "ours" in k},
        "memory": _memory(found),
    }


def _hidden(runs: List[Results], found: Dict[str, List[Results]], key: str) -> Dict[str, Any]:
    """Time in collectives, and which share of it a step does not take longer for."""
    inside = [mean(r["collective_s"] for r in results) for results in runs]
    step = [mean(r["step_s"] for r in results) for results in runs]
    alone = [mean(r["step_s"] for r in rs) for rs in found[key.replace("ours", "gluon")]]
    hidden = [1 - (a - b) / c for a, b, c in zip(step, alone, inside)]
    return {
        "seconds_per_step": spread(inside),
        "extra_step_s": spread([a - b for a, b in zip(step, alone)]),
        "hidden": spread(hidden) if len(runs[0]) > 1 else None,
    }


def _memory(found: Dict[str, List[Results]]) -> Dict[str, Any]:
    """Bytes per rank, the largest of all ranks, the median over rounds.

    ``grown`` is what network, trainer and training took beyond imports and MPI, private and
    shared; ``beyond_gluon`` the same less that of `gluon.Trainer`, in copies of the gradients.
    """
    rows: Dict[str, Any] = {}
    for key, runs in found.items():
        kinds = runs[0][0]["memory"]
        row = {k: median(max(r["memory"][k] for r in rs) for rs in runs) for k in kinds}
        row["grown"] = median(max(map(_grown, rs)) for rs in runs)
        rows[key] = row
    gradients = next(iter(found.values()))[0][0]["gradient_bytes"]
    base = rows.get("gluon-1", {}).get("grown")
    for row in rows.values():
        row["beyond_gluon"] = (row["grown"] - base) / gradients if base is not None else None
    return {"gradient_bytes": gradients, "ranks": rows}


def _grown(result: Dict[str, Any]) -> int:
    now, before = result["memory"], result["memory_before"]
    return sum(now[kind] - before[kind] for kind in ("anon", "pss_shmem"))


def show(results: Dict[str, Any]) -> None:
    """Print the tables."""
    for key, row in results.get("images_per_s", {}).items():
        _line(key, row, "{:10.1f}", "images/s")
    for name, row in results.get("ratios", {}).items():
        target = row["target"]
        missed = target and row["median"] < target
        _line(name, row, "{:10.3f}", _target(f"{target}", missed) if target else "")
    for key, row in results.get("scaling_efficiency", {}).items():
        _line(f"{key}, scaling efficiency", row, "{:10.1%}")
    for key, row in results.get("collectives", {}).items():
        _line(f"{key}, in collectives", _scaled(row["seconds_per_step"]), "{:10.2f}", "ms a step")
        _line(f"{key}, longer step", _scaled(row["extra_step_s"]), "{:10.2f}", "ms")
        if row["hidden"]:
            _line(f"{key}, hidden", row["hidden"], "{:10.1%}")
    if "memory" in results:
        _show_memory(results["memory"])
    if "pushing" in results:
        row = results["pushing"]
        what = f"pushing {row['parameters']} gradients of {row['model']}"
        missed = row["idle_s"]["median"] > row["target_s"]
        target = _target(f"{row['target_s'] * 1e3:g}", missed)
        _line(what, _scaled(row["idle_s"]), "{:10.3f}", f"ms, {target}")
        _line("  behind backward", _scaled(row["behind_backward_s"]), "{:10.3f}", "ms")
    if "timeline" in results:
        _show_timeline(results["timeline"])


def _target(target: str, missed: bool) -> str:
    return f"target {target}{'  MISSED' if missed else ''}"


def _scaled(row: Dict[str, Any]) -> Dict[str, Any]:
    return {k: row[k] * 1e3 for k in ("median", "low", "high")}


def _line(what: str, row: Dict[str, Any], form: str, unit: str = "") -> None:
    median_, low, high = (form.format(row[k]) for k in ("median", "low", "high"))
    print(f"{what:<42}{median_}  {f'({low.strip()} to {high.strip()})':<20}  {unit}".rstrip())


def _show_memory(memory: Dict[str, Any]) -> None:
    gradients = memory["gradient_bytes"] / 1e6
    print(f"memory per rank in MB (gradients: {gradients:.1f}); beyond gluon-1 in gradients")
    kinds = ("peak", "anon", "shmem", "pss_shmem", "grown")
    print(f"{'':<12}" + "".join(f"{kind:>11}" for kind in (*kinds, "beyond")))
    for key, row in memory["ranks"].items():
        beyond = "" if row["beyond_gluon"] is None else f"{row['beyond_gluon']:11.2f}"
        if key.startswith("ours") and row["beyond_gluon"] is not None:
            beyond += f"  {_target(f'{_MOST_BEYOND}', row['beyond_gluon'] > _MOST_BEYOND)}"
        print(f"{key:<12}" + "".join(f"{row[kind] / 1e6:11.1f}" for kind in kinds) + beyond)


def _show_timeline(found: Dict[str, Any]) -> None:
    print(
        f"backward took {found['backward_ms']:.1f} ms; {found['inside']:.1%} of the time in "
        f"collectives lay inside it (medians of {found['steps']} steps of rank 0)"
    )
    for row in found["buckets"]:
        when = "before" if row["begins_ms"] < 0 else "after"
        print(
            f"bucket {row['bucket']:<3} began {abs(row['begins_ms']):7.1f} ms {when:<6} the end of "
            f"backward, took {row['takes_ms']:6.1f} ms, {row['inside_ms']:6.1f} ms of it inside"
        )


def plot(results: Dict[str, Any], path: Path) -> None:
    """Draw images per second of all contestants as bars into `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speeds = results["images_per_s"]
    middle = [row["median"] for row in speeds.values()]
    below = [row["median"] - row["low"] for row in speeds.values()]
    above = [row["high"] - row["median"] for row in speeds.values()]
    colours = {"gluon": "tab:grey", "ours": "tab:blue", "horovod": "tab:orange"}
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.bar(
        list(speeds), middle, yerr=[below, above], color=[colours[k.split("-")[0]] for k in speeds]
    )
    axes.set_ylabel("images/s of all processes")
    axes.set_title(f"{results['model']}, batch {results['batch_size']} per process")
    figure.savefig(path, dpi=150, bbox_inches="tight")
