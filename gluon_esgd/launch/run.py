"""``gluon-esgd run``: looks at this machine, plans, and runs or prints the job."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import FrozenSet, Iterator, Mapping, Optional

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
    processes = plan(spec, site)
    if spec.dry_run:
        print(show(processes))
        return 0
    _make_job_dir(site.job_dir)
    print(f"gluon-esgd: job in {site.job_dir}", file=sys.stderr, flush=True)
    limit = spec.start_timeout_s or site.base.start_timeout_s
    return Runner(processes, site.job_dir, spec.client_size, limit, os.environ, output).run()


def look_around(spec: JobSpec, environ: Mapping[str, str]) -> Site:
    """Return what the plan needs to know of this machine and this moment."""
    here = frozenset(host.name for host in spec.host_list if is_here(host.name))
    name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    return Site(
        python=sys.executable,
        cwd=os.getcwd(),
        job_dir=os.path.abspath(spec.job_dir or os.path.join(".esgd", name)),
        here=here,
        scheduler=_scheduler(spec, here) if spec.num_servers else None,
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


def _scheduler(spec: JobSpec, here: FrozenSet[str]) -> str:
    host = spec.host_list[0].name
    if len(here) == len(spec.host_list):
        return f"127.0.0.1:{spec.port or _free_port('127.0.0.1')}"
    address = _address(host)
    port = spec.port or _free_port(address if address and host in here else "127.0.0.1")
    return f"{address or host}:{port}"


def _address(host: str) -> Optional[str]:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None  # only in a dry run; otherwise it is a fault of the command line


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _make_job_dir(path: str) -> None:
    """Make the folder, private; logs and state of an earlier job in it move aside."""
    if proc.job_processes(proc.marker(path)):
        raise LaunchError(f"a job is running in {path}; end it, or give another --job-dir")
    Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    for part in (Path(path, "logs"), Path(path, "state")):
        if part.exists():
            part.rename(next(old for old in _numbered(part) if not old.exists()))
        part.mkdir(mode=0o700)


def _numbered(path: Path) -> Iterator[Path]:
    return (path.with_name(f"{path.name}.{k}") for k in count(1))
