"""``gluon-esgd run``: looks at this machine, plans, and runs or prints the job."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import FrozenSet, Iterator, Mapping

from ..errors import LaunchError
from ..settings import PREFIX, Settings, read
from . import mpi, proc
from .faults import OWNED
from .hosts import is_here
from .plan import Site, plan, show
from .runner import Runner
from .spec import JobSpec

__all__ = ["look_around", "run"]

_STALL_ABORT_S = 600.0


def run(spec: JobSpec, output: int = 1) -> int:
    """Run a job and return the exit code of the launcher; with `dry_run` only print it.

    What the ranks print goes to the file descriptor `output`.

    Raises
    ------
    LaunchError
        Another job runs in the folder of the job.
    OSError
        The folder cannot be made.
    """
    site = look_around(spec, os.environ)
    if spec.dry_run:
        print(show(plan(spec, site)))
        return 0
    _make_job_dir(site.job_dir, spec.resume)
    print(f"gluon-esgd: job in {site.job_dir}", file=sys.stderr, flush=True)
    return Runner(spec, site, output).run()


def look_around(spec: JobSpec, environ: Mapping[str, str]) -> Site:
    """Return what the plan needs to know of this machine and this moment."""
    here = frozenset(host.name for host in spec.host_list if is_here(host.name))
    name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    return Site(
        python=sys.executable,
        cwd=os.getcwd(),
        job_dir=os.path.abspath(spec.job_dir or os.path.join(".esgd", name)),
        here=here,
        address=_address(spec, here),
        mpi=mpi.find(spec.mpiexec) if spec.needs_mpi else None,
        environ=environ,
        base=_user_settings(spec, environ),
    )


def _user_settings(spec: JobSpec, environ: Mapping[str, str]) -> Settings:
    """Return the settings that are the user's to make; the launcher's own come from flags."""
    given = {**environ, **{name: value for name, value in spec.env if value is not None}}
    settings = read({n: v for n, v in given.items() if n.startswith(PREFIX) and n not in OWNED})
    if PREFIX + "STALL_ABORT_S" in given:
        return settings
    return replace(settings, stall_abort_s=_STALL_ABORT_S)


def _address(spec: JobSpec, here: FrozenSet[str]) -> str:
    """Return by which address the scheduler, on the first host, is reached."""
    if len(here) == len(spec.host_list):
        return "127.0.0.1"
    host = spec.host_list[0].name
    try:
        return socket.gethostbyname(host)
    except (OSError, ValueError):
        return host  # only in a dry run; otherwise it is a fault of the command line


def _make_job_dir(path: str, resume: bool) -> None:
    """Make the folder, private; what an earlier job left in it moves aside, or is resumed from."""
    if proc.job_processes(proc.marker(path)):
        raise LaunchError(f"a job is running in {path}; end it, or give another --job-dir")
    Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    logs, state, checkpoints = (Path(path, name) for name in ("logs", "state", "checkpoints"))
    for part in (logs, state, *[checkpoints] * (not resume)):
        if part.exists():
            part.rename(next(old for old in _numbered(part) if not old.exists()))
    for part in (logs, state):
        part.mkdir(mode=0o700)


def _numbered(path: Path) -> Iterator[Path]:
    return (path.with_name(f"{path.name}.{k}") for k in count(1))
