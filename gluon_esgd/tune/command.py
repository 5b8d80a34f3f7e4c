"""The command ``gluon-esgd tune``: a job for each number of ranks, then the table."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional, Tuple

from ..errors import LaunchError
from ..launch.run import run
from ..launch.spec import JobSpec
from .request import START_S, Request, add_arguments, request_from

__all__ = ["add_command", "tune"]

_RECORD = "record.json"
_ENDED = (130, 143, 129)  # by Ctrl-C, SIGTERM, SIGHUP
_MOST_RANKS = 16  # more take memory and time; who has a use for them says so

_ABOUT = """\
Measure on this machine which algorithm of a collective is the fastest, by size, and write the
table that `auto` follows. In a job on several machines start python -m gluon_esgd.tune instead.
"""


def add_command(commands: Any) -> None:
    """Add ``tune`` to the subcommands of ``gluon-esgd``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune", help="measure this machine for auto", description=_ABOUT, allow_abbrev=False
    )
    default = ",".join(map(str, _default_ranks()))
    parser.add_argument("-n", metavar="N,M", help=f"numbers of ranks (default here: {default})")
    add_arguments(parser)
    parser.add_argument(
        "--mpiexec", metavar="PATH", help="MPICH's or Open MPI's (default: as gluon-esgd run)"
    )
    parser.set_defaults(go=_go)


def _default_ranks() -> Tuple[int, ...]:
    cores = len(os.sched_getaffinity(0))
    return tuple(sorted({2, 4, max(4, min(cores, _MOST_RANKS))}))


def _go(options: argparse.Namespace) -> int:
    try:
        return tune(request_from(options, options.n, _default_ranks()), options.mpiexec)
    except (ValueError, LaunchError, OSError) as error:
        print(f"gluon-esgd tune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # between two jobs; in one the launcher sees to it
        return _ENDED[0]


def tune(request: Request, mpiexec: Optional[str] = None) -> int:
    """Measure, show and write; return the exit code.

    Raises
    ------
    ValueError, LaunchError
        The ranks cannot be started here; lists every reason.
    OSError
        The table cannot be written.
    """
    # Here, since gluon-esgd must start where numpy is missing, to say so.
    from .results import check_place, merge, text, told, write

    check_place(request.output)
    folder = Path(tempfile.mkdtemp(prefix="gluon-esgd-tune-"))
    code = 0
    try:
        code = _run(request, mpiexec, folder)
        if code == 0:
            measured = json.loads((folder / _RECORD).read_text())
            write(request.output, merge(request.output, measured))
            print(text(measured), flush=True)
            print(f"gluon-esgd tune: {told(request.output)}", file=sys.stderr)
    finally:
        if code in (0, *_ENDED):  # else there are logs to be read
            shutil.rmtree(folder)
    return code


def _run(request: Request, mpiexec: Optional[str], folder: Path) -> int:
    """Run a job for each number of ranks; return the exit code of the last."""
    for number, ranks in enumerate(request.ranks, 1):
        job = _job(request, ranks, mpiexec, folder)
        of_all = f"{ranks} ranks, job {number} of {len(request.ranks)}"
        print(f"gluon-esgd tune: {of_all}", file=sys.stderr, flush=True)
        code = run(job, output=2)  # standard output is for the table
        if code:
            return code
    return 0


def _job(request: Request, ranks: int, mpiexec: Optional[str], folder: Path) -> JobSpec:
    limit_s = request.limit_s / len(request.ranks) - START_S
    flags = ["--record", str(folder / _RECORD), "--time-limit", f"{limit_s:.1f}"]
    sizes = ["--sizes", ",".join(map(str, request.sizes))]
    return JobSpec(
        command=(sys.executable, "-m", "gluon_esgd.tune", *flags, *sizes),
        workers=ranks,
        mpiexec=mpiexec,
        job_dir=str(folder / f"ranks{ranks}"),
    )
