"""All that can be wrong with a job, found before anything is started; one sentence each."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import socket
import sys
from dataclasses import fields
from importlib import metadata
from typing import TYPE_CHECKING, Dict, Iterator, List, Mapping

from ..errors import LaunchError, SettingsError
from ..settings import MOST_SECONDS, PREFIX, RULES, Settings, read
from . import mpi
from .hosts import is_here

if TYPE_CHECKING:
    from .spec import JobSpec

__all__ = ["all_faults"]

# A plan of more would take minutes and gigabytes; it is a slip of the keyboard.
MOST_RANKS, MOST_SERVERS = 4096, 1024

OWNED = {PREFIX + f.name.upper() for f in fields(Settings) if "launcher" in f.metadata["by"]}

# MXNet's wheels for GPUs have names of their own: mxnet-cu112 and so on.
CUDA_WHEELS = ("-cu102", "-cu110", "-cu112", "-cu113", "-cu114", "-cu115", "-cu116", "-cu117")

# MXNet 1.9.1 is what the engine door and the servers are written for; it needs numpy < 1.24.
_WANTED = (("mxnet", "==1.9.1", r"1\.9\.1$"), ("numpy", "<1.24", r"1\.([01]?\d|2[0-3])\."))


def all_faults(spec: JobSpec) -> List[str]:
    """Return every fault of `spec`, as sentences with value, rule and remedy."""
    checks = (_counts, _elastic, _machines, _options, _environment, _versions, _this_machine)
    return [fault for check in checks for fault in check(spec)]


def _counts(spec: JobSpec) -> Iterator[str]:
    if not 1 <= spec.workers <= MOST_RANKS:
        yield f"-n {spec.workers} must be at least 1, and {MOST_RANKS} at most"
    if spec.clients < 1:
        yield f"--clients {spec.clients} must be at least 1"
    elif 1 <= spec.workers <= MOST_RANKS and spec.workers % spec.clients:
        yield _unequal(spec.workers, spec.clients)
    if not 0 <= spec.num_servers <= MOST_SERVERS:
        yield f"--servers {spec.num_servers} must be at least 0, and {MOST_SERVERS} at most"
    if spec.is_split and spec.rule == "asgd":
        yield (
            f"--servers 0 with --rule asgd and {spec.clients} clients: asynchronous clients need "
            "a server; give at least 1, or another rule"
        )


def _unequal(workers: int, clients: int) -> str:
    """The fault, with numbers near by that fit; `clients` does not divide `workers`."""
    fits = [n for n in range(1, workers + 1) if workers % n == 0]
    near = [max(n for n in fits if n < clients), *[n for n in fits if n > clients][:1]]
    below, above = workers - workers % clients, workers - workers % clients + clients
    totals = " or ".join(f"-n {n}" for n in (below, above) if 1 <= n <= MOST_RANKS)
    fault = f"--clients {clients} must divide -n {workers}: clients are of equal size"
    other = " or ".join(f"--clients {n}" for n in near)
    return f"{fault}; give {other}" + (f", or {totals}" if totals else "")


def _elastic(spec: JobSpec) -> Iterator[str]:
    if spec.rule is not None and spec.rule not in RULES:
        yield f"--rule {spec.rule} must be one of {', '.join(RULES)}"
    if spec.compression not in (None, "fp16"):
        yield f"--compression {spec.compression} must be fp16, or left out"
    if spec.interval is not None and spec.interval < 1:
        yield f"--interval {spec.interval} must be at least 1"
    if spec.interval is not None and spec.rule == "sgd":
        yield f"--interval {spec.interval} with --rule sgd, which exchanges at every step; drop one"
    if spec.lazy is not None and spec.lazy < 0:
        yield f"--lazy {spec.lazy} must be at least 0"
    if spec.lazy is not None and spec.interval is not None and spec.lazy > spec.interval:
        yield f"--lazy {spec.lazy} must not exceed --interval {spec.interval}"
    yield from _moving_rate(spec)


def _moving_rate(spec: JobSpec) -> Iterator[str]:
    clients = max(1, spec.clients)
    bound = 2 / (1 + clients)
    alpha, name = spec.alpha, f"--alpha {spec.alpha}"
    if spec.alpha is not None and spec.beta is not None:
        both = f"--alpha {spec.alpha} and --beta {spec.beta}"
        yield f"{both}: give one, alpha = beta / max(2, clients)"
    elif spec.beta is not None:
        alpha, name = spec.beta / max(2, clients), f"--beta {spec.beta}"
    if alpha is not None and not 0 <= alpha <= bound:
        yield (
            f"{name}: alpha = {alpha:g} must lie in 0 .. 2/(1+clients) = {bound:g} "
            f"for {clients} clients, beyond which the exchange diverges"
        )


def _machines(spec: JobSpec) -> Iterator[str]:
    slots = sum(host.slots for host in spec.host_list)
    if spec.workers > slots:
        yield f"-n {spec.workers} exceeds the {slots} slots of the hosts given"
    idle = [host.name for host in spec.hosts if host.slots == 0]
    if idle and not spec.num_servers:
        yield f"hosts {', '.join(idle)} have 0 slots, which is for servers, and there are none"
    local = [host.name for host in spec.hosts if is_here(host.name)]
    away = [host.name for host in spec.hosts if host.name not in local]
    if len(local) > 1:
        yield f"hosts {', '.join(local)} are all this machine; give one, with all its slots"
    if away and spec.hosts[0].name == "localhost":
        yield "host localhost among others: give the name by which they reach this machine"
    if away:
        yield from _reach(spec, away)


def _reach(spec: JobSpec, away: List[str]) -> Iterator[str]:
    addresses: Dict[str, str] = {}
    for name in [] if spec.dry_run else dict.fromkeys([spec.hosts[0].name, *away]):
        try:
            addresses[name] = socket.gethostbyname(name)
        except OSError as error:
            yield f"host {name!r:.80} has no address ({error.strerror or error})"
        except ValueError:  # of the codec for names
            yield f"host {name!r:.80} is no name that a machine can have"
    yield from _scheduler(spec, addresses)
    try:
        words = shlex.split(spec.remote_shell)
    except ValueError:  # a quotation that does not end
        words = []
    if not words or not (spec.dry_run or shutil.which(words[0])):
        yield f"--remote-shell {spec.remote_shell!r} is not a program on PATH"


def _scheduler(spec: JobSpec, addresses: Mapping[str, str]) -> Iterator[str]:
    """It listens where the first host's name leads on this machine; others must get there too."""
    name = spec.hosts[0].name
    own, outside = addresses.get(name, ""), [a for a in addresses.values() if a[:4] != "127."]
    if spec.num_servers and outside and own.startswith("127."):
        yield (
            f"host {name!r:.80} is {own} here, where other hosts cannot reach the scheduler: give "
            "the address of the interface that they reach"
        )


def _options(spec: JobSpec) -> Iterator[str]:
    yield from _seconds(spec)
    yield from _restarts(spec)
    if spec.bind not in ("cores", "none"):
        yield f"--bind {spec.bind} must be cores or none"
    for name, value in spec.env:
        yield from _variable(name, value)


def _seconds(spec: JobSpec) -> Iterator[str]:
    for flag, seconds, low in (
        ("--start-timeout", spec.start_timeout_s, "above"),
        ("--center-snapshot", spec.center_snapshot_s, "above"),
        ("--grace", spec.grace_s, "at least"),
    ):
        if seconds is None or 0 < seconds <= MOST_SECONDS:
            continue
        if low == "at least" and seconds == 0 and math.copysign(1, seconds) > 0:  # not -0
            continue
        yield f"{flag} {seconds:g} must be {low} 0 seconds, {MOST_SECONDS:.0f} at most"


def _restarts(spec: JobSpec) -> Iterator[str]:
    if spec.max_restarts is not None and spec.max_restarts < 0:
        yield f"--max-restarts {spec.max_restarts} must be at least 0"
    least = spec.min_clients
    if least is not None and not 1 <= least <= spec.clients:
        yield f"--min-clients {least} must lie in 1 .. {spec.clients}, the number of clients"
    elif least not in (None, spec.clients) and (spec.num_servers < 1 or spec.rule == "sgd"):
        yield (
            f"--min-clients {least}: only clients that exchange through servers by rule esgd or "
            "asgd can go on without one; leave it out"
        )
    if spec.resume and not os.path.isdir(spec.job_dir or ""):
        yield f"--resume {spec.job_dir!r} is not a folder; give that of the job to go on with"


def _variable(name: str, value: object) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        yield f"--env {name!r} must be NAME=VALUE or NAME"
    elif name.startswith(("DMLC_", "PS_")) or name == "PORT":
        yield f"--env {name}: the parameter server's own variables are not passed to workers"
    elif name in OWNED:
        yield f"--env {name}: set by the launcher itself; use its flags"
    elif value is None and name not in os.environ:
        yield f"--env {name}: not set here, so there is nothing to pass on; give {name}=VALUE"


def _environment(spec: JobSpec) -> Iterator[str]:
    given = {name: value for name, value in spec.env if value is not None}
    try:
        read({**os.environ, **given})
    except SettingsError as error:
        yield str(error)


def _versions(spec: JobSpec) -> Iterator[str]:
    """What servers and workers import; nothing is imported here."""
    for name, wanted, suits in _WANTED:
        found = _version(name)
        if not spec.dry_run and re.match(suits, found) is None:
            yield f"{name} is {found} in {sys.prefix}: pip install '{name}{wanted}'"


def _version(name: str) -> str:
    for cuda in ("", *CUDA_WHEELS):
        try:
            return metadata.version(name + cuda)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _this_machine(spec: JobSpec) -> Iterator[str]:
    if not spec.command:
        yield "no command: give what each worker runs after the options, as python train.py"
    elif is_here(spec.host_list[0].name) and shutil.which(spec.command[0]) is None:
        yield _no_program(spec.command[0])
    if spec.port is not None:
        yield from _port(spec)
    if spec.clients >= 1 and spec.needs_mpi:
        yield from _mpiexec(spec)


def _no_program(name: str) -> str:
    fault = f"command {name!r} is not a program on PATH or a path to one"
    if not os.path.isfile(name):
        return fault
    if name.endswith(".py"):
        return f"{fault}, but a file: give python {name}"
    return f"{fault}, but a file: chmod +x {shlex.quote(name)}, with #! and what runs it as line 1"


def _port(spec: JobSpec) -> Iterator[str]:
    port = spec.port or 0
    if not 0 < port < 65536:
        yield f"--port {port} must lie in 1 .. 65535"
    elif spec.num_servers and is_here(spec.host_list[0].name) and not _is_free(port):
        yield f"--port {port} is in use or not allowed here; leave it out to get a free one"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _mpiexec(spec: JobSpec) -> Iterator[str]:
    try:
        mpi.find(spec.mpiexec)
    except LaunchError as error:
        yield str(error)
