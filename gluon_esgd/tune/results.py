"""From measured times to the table: choices, the text that is shown, the file."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Optional

from ..collectives.choice import default
from ..collectives.tuning import VERSION, load, shape_of
from ..communicator import Communicator
from ..durable import write_whole
from ..settings import PREFIX, own_tuning_path, read
from .measure import Samples
from .request import size_text

__all__ = [
    "check_place",
    "choices_of",
    "describe",
    "fastest",
    "merge",
    "processor",
    "text",
    "told",
    "write",
]

Document = Dict[str, Any]

# What is faster than the built-in choice only by noise must not replace it: that takes a median
# of so much of its time, and to be the faster one in so many of the rounds.
_CLEARLY, _MOSTLY = 0.95, 0.75
_SHORT = 60  # characters of a line in the file
_OPEN_FROM_BYTES = 16 << 20  # from here on it is the memory's speed that counts


def describe(samples: Samples, comm: Communicator, mpi: str) -> Document:
    """Return what the file holds of one shape: choices, times, and what they belong to."""
    machines, ranks = shape_of(comm)
    return {
        "version": VERSION,
        "choices": {f"{machines}x{ranks}": choices_of(samples, comm)},
        "measured": {
            f"{machines}x{ranks}": {
                "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
                "ranks": comm.size,
                "machine": f"{socket.gethostname()}, {os.cpu_count()} cores, {processor()}",
                "mpi": mpi,
                "microseconds": {
                    collective: {nbytes: _medians(by_name) for nbytes, by_name in by_size.items()}
                    for collective, by_size in samples.items()
                },
            }
        },
    }


def choices_of(samples: Samples, comm: Communicator) -> Dict[str, List[List[Any]]]:
    """Return for each collective its ``[up to bytes, algorithm]``, changes between sizes."""
    return {
        collective: _steps(
            {
                nbytes: fastest(by_name, default(collective, nbytes, comm))
                for nbytes, by_name in sorted(by_size.items())
            }
        )
        for collective, by_size in samples.items()
    }


def fastest(by_name: Dict[str, List[float]], preferred: str) -> str:
    """Return the fastest algorithm by its times in each round; where unclear, `preferred`."""
    medians = _medians(by_name)
    usual = by_name.get(preferred)
    if usual is not None:
        better = {
            name: medians[name]
            for name, times in by_name.items()
            if medians[name] < _CLEARLY * medians[preferred]
            and sum(mine < other for mine, other in zip(times, usual)) >= _MOSTLY * len(usual)
        }
        medians = better or {preferred: medians[preferred]}
    return min(medians, key=lambda name: medians[name])


def _medians(by_name: Dict[str, List[float]]) -> Dict[str, float]:
    return {name: round(median(times), 2) for name, times in by_name.items()}


def _steps(chosen: Dict[int, str]) -> List[List[Any]]:
    sizes = list(chosen)
    steps: List[List[Any]] = []
    for nbytes, larger in zip(sizes, sizes[1:]):
        if chosen[nbytes] != chosen[larger]:
            steps.append([int(sqrt(nbytes * larger)), chosen[nbytes]])
    last = sizes[-1]
    return [*steps, [None if last >= _OPEN_FROM_BYTES else 2 * last, chosen[last]]]


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def text(document: Document) -> str:
    """Return the measured times as tables, the choice of each row marked."""
    return "\n".join(
        line
        for shape, measured in document["measured"].items()
        for line in _tables(shape, measured, document["choices"][shape])
    )


def _tables(shape: str, measured: Document, choices: Document) -> List[str]:
    machines = shape.partition("x")[0]
    where = "1 machine" if machines == "1" else f"{machines} machines"
    lines = [f"{measured['ranks']} ranks on {where}, {measured['mpi']}; microseconds"]
    for collective, by_size in measured["microseconds"].items():
        names = sorted({name for by_name in by_size.values() for name in by_name})
        lines.append(f"  {collective:14}" + "".join(f"{name:>14}" for name in names))
        for nbytes, by_name in by_size.items():
            chosen = _chosen(choices[collective], int(nbytes))
            row = "".join(_number(by_name.get(name), name == chosen) for name in names)
            lines.append(f"  {size_text(int(nbytes)):>14}{row}".rstrip())
    return [*lines, ""]


def _chosen(steps: List[List[Any]], nbytes: int) -> Optional[str]:
    return next((name for bound, name in steps if bound is None or nbytes <= bound), None)


def _number(value: Optional[float], chosen: bool) -> str:
    shown = "" if value is None else f"{value:.1f}"
    return f"{shown:>12}{' *' if chosen else '  '}"


def merge(path: str, new: Document) -> Document:
    """Return `new` together with the other shapes of the table in `path`, if that is a good one."""
    try:
        old = load(path)[1]
    except (OSError, ValueError):
        old = {}
    out: Document = {"version": VERSION}
    for part in ("choices", "measured"):
        before = old.get(part)
        out[part] = {**(before if isinstance(before, dict) else {}), **new[part]}
    return out


def check_place(path: str) -> None:
    """Make the folder of `path`, and see that a file can be written there.

    Raises
    ------
    OSError
        It cannot.
    """
    folder, fault = os.path.dirname(os.path.realpath(path)), None
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        fault = f"{folder}: {error.strerror}"
    if fault is None and os.path.isdir(path):
        fault = "it is a folder"
    if fault is None and not os.access(folder, os.W_OK | os.X_OK):
        fault = f"the folder {folder} is not writable"
    if fault is not None:
        raise OSError(f"{path} cannot be written: {fault}; give another file with --output")


def told(path: str) -> str:
    """Return what to say when the table was written to `path`."""
    if os.path.realpath(path) == os.path.realpath(read().tuning or own_tuning_path()):
        return f"wrote {path}"
    return f"wrote {path}; auto follows it where {PREFIX}TUNING={path} is set"


def write(path: str, document: Document) -> None:
    """Write the file in one piece: nobody ever reads half of it, whatever happens meanwhile."""
    write_whole(os.path.realpath(path), f"{_json(document)}\n".encode())  # a link stays one


def _json(value: Any, indent: str = "") -> str:
    """JSON that holds on one line what is short or holds nothing that is nested itself."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    line = json.dumps(value)
    if len(line) < _SHORT or not any(isinstance(v, (dict, list)) for v in inner):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        lines = [f"{deeper}{json.dumps(str(k))}: {_json(v, deeper)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + _json(v, deeper) for v in value) + f"\n{indent}]"
