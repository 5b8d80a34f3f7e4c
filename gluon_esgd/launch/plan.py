"""From a `JobSpec` to the processes of the job, as data; starts nothing and reads nothing."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from ..settings import PREFIX, Settings
from .gpus import VISIBLE
from .hosts import place_workers, remote_argv
from .mpi import Mpi, Reach
from .proc import client_marker, marker
from .spec import JobSpec

__all__ = [
    "STATION",
    "Process",
    "Site",
    "client_process",
    "leader_at",
    "plan",
    "servers_at",
    "show",
    "socket_path",
    "station_process",
    "workers_at",
]

STATION = ("-m", "gluon_esgd.center.station")  # what the interpreter runs on each host
TELL = "gluon_esgd.launch.tell"


@dataclass(frozen=True)
class Site:
    """What the plan needs to know of the machine and the moment.

    Attributes
    ----------
    python, cwd : str
        Interpreter of the job and the folder it is started in.
    job_dir : str
        Absolute path of the job's folder.
    here : frozenset of str
        Names among the job's hosts that are this machine.
    address : str
        By which the other hosts reach the scheduler, when there are servers.
    mpi : Mpi, optional
        The mpiexec, when clients have several ranks or share an MPI job.
    environ : mapping of str to str
        The launcher's own environment.
    base : Settings
        What the user's variables say, with the launcher's defaults.
    added : tuple of str
        Hosts of the clients that were added to the running job, by their numbers.
    """

    python: str
    cwd: str
    job_dir: str
    here: FrozenSet[str]
    address: str
    mpi: Optional[Mpi]
    environ: Mapping[str, str]
    base: Settings
    added: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Process:
    """One process that the launcher starts itself.

    Attributes
    ----------
    name : str
        "station 0", "client 1".
    host : str
        Where it runs; the first host for an MPI job on several.
    argv : tuple of str
        The command.
    env : mapping of str to str
        Variables set for it, on top of the launcher's cleaned environment.
    log : str
        File that gets its output; ranks write logs of their own.
    client : int, optional
        Number of the client, the first where it starts several; None for a station.
    clients : int
        How many clients it starts.
    remote : bool
        Reached through a remote shell; its standard input is the control channel.
    station : int, optional
        Number of the host whose station it is; standard input and output carry messages.
    away : frozenset of int
        Ranks of its MPI job that are on other hosts.
    tellers : tuple of Process
        What passes a signal on to them, one process for each of these hosts.
    """

    name: str
    host: str
    argv: Tuple[str, ...]
    env: Mapping[str, str]
    log: str
    client: Optional[int] = None
    clients: int = 1
    remote: bool = False
    station: Optional[int] = None
    away: FrozenSet[int] = frozenset()
    tellers: Tuple[Process, ...] = ()


def plan(spec: JobSpec, site: Site) -> List[Process]:
    """Return the processes in the order of their start: stations, clients."""
    clients = [0] if spec.is_split else range(spec.clients)
    return [*_stations(spec, site), *(client_process(spec, site, k) for k in clients)]


def client_process(spec: JobSpec, site: Site, client: int, life: int = 0) -> Process:
    """Return what starts a client for the `life`-th time again; all clients of a split job."""
    process = _client(spec, site, client, life)
    if not spec.is_split:
        return process
    return replace(process, name=f"clients 0 to {spec.clients - 1}", clients=spec.clients)


def servers_at(spec: JobSpec) -> List[int]:
    """Return for each server the number of its host; the scheduler is on the first.

    They are on hosts without workers, in turn; where there is none of these, on all hosts.
    """
    hosts = spec.host_list
    free = [number for number, host in enumerate(hosts) if host.slots == 0]
    usable = free or range(len(hosts))
    return [usable[k % len(usable)] for k in range(spec.num_servers)]


def workers_at(spec: JobSpec, added: Sequence[str] = ()) -> List[str]:
    """Return the host of each worker, those of clients that were `added` behind the others."""
    more = [host for host in added for _ in range(spec.client_size)]
    return [*place_workers(spec.host_list, spec.workers), *more]


def leader_at(spec: JobSpec, client: int, added: Sequence[str] = ()) -> int:
    """Return the number of the host on which a client has its rank 0."""
    first = workers_at(spec, added)[client * spec.client_size]
    return [host.name for host in spec.host_list].index(first)


def _stations(spec: JobSpec, site: Site) -> List[Process]:
    if not spec.num_servers:
        return []
    leaders_at = (leader_at(spec, client) for client in range(spec.clients))
    numbers = sorted({0, *servers_at(spec), *leaders_at})
    return [station_process(spec, site, number) for number in numbers]


def station_process(spec: JobSpec, site: Site, number: int) -> Process:
    """Return the station of a host, by its number."""
    host = spec.host_list[number].name
    settings = replace(_settings(spec, site), places=None, bind="none", station=None)
    env = {**settings.environment(), VISIBLE: ""}
    argv, log = (site.python, *STATION), f"{site.job_dir}/logs/station.log"
    return _placed(spec, site, Process(f"station {number}", host, argv, env, log, station=number))


def _client(spec: JobSpec, site: Site, client: int, life: int) -> Process:
    hosts = workers_at(spec, site.added)
    mine = [hosts[worker] for worker in _workers(spec, client)]
    name, log = f"client {client}", f"{site.job_dir}/logs/client{client}.log"
    settings = replace(_settings(spec, site, client), life=life)
    # The number also where it is the default: it marks the client's processes.
    env = {**_user_env(spec, site), **settings.environment(), f"{PREFIX}CLIENT": str(client)}
    if len(mine) > 1:
        argv, vendor_env = _mpi_job(spec, site, mine, env)
        process = Process(name, mine[0], argv, {**vendor_env, **env}, log, client)
        return _with_tellers(spec, site, process, mine)
    argv = _wrapped(site, "gluon_esgd.launch.rank", [], spec.command)
    return _placed(spec, site, Process(name, mine[0], argv, env, log, client))


def _mpi_job(
    spec: JobSpec, site: Site, hosts: Sequence[str], env: Mapping[str, str]
) -> Tuple[Tuple[str, ...], Dict[str, str]]:
    """Return the command of a client of several ranks, and what its MPI wants in `env`."""
    assert site.mpi is not None, "clients of several ranks are planned with an mpiexec"
    own_name = next((host.name for host in spec.host_list if host.name in site.here), None)
    local = set(hosts) <= site.here
    reach = Reach(local, spec.remote_shell, own_name, tuple(sorted(env)))
    shares = [(host, len(list(group))) for host, group in groupby(hosts)]
    command = _wrapped(site, "gluon_esgd.launch.rank", [], spec.command)
    wanted = site.mpi.environment(reach)
    vendor_env = {name: value for name, value in wanted.items() if name not in site.environ}
    return tuple(site.mpi.argv(shares, reach, command)), vendor_env


def _with_tellers(spec: JobSpec, site: Site, process: Process, hosts: Sequence[str]) -> Process:
    """Return an MPI job with what tells its ranks on other hosts to end; `mpiexec` would not."""
    ranks = {h: [r for r, at in enumerate(hosts) if at == h] for h in dict.fromkeys(hosts)}
    away = {host: numbers for host, numbers in ranks.items() if host not in site.here}
    env = dict([marker(site.job_dir).split("=", 1)])
    tellers = []
    for host, numbers in away.items():
        listed = ",".join(map(str, numbers))
        argv = [site.python, "-m", TELL, client_marker(process.client or 0), listed]
        words = remote_argv(spec.remote_shell, host, site.cwd, env, argv)
        name = f"what signals {process.name} on {host}"
        tellers.append(Process(name, host, tuple(words), env, process.log, remote=True))
    numbers_away = frozenset(number for numbers in away.values() for number in numbers)
    return replace(process, away=numbers_away, tellers=tuple(tellers))


def _wrapped(
    site: Site, module: str, flags: Sequence[str], command: Sequence[str]
) -> Tuple[str, ...]:
    return (site.python, "-m", module, *flags, "--", *command)


def _placed(spec: JobSpec, site: Site, process: Process) -> Process:
    """Return the process as it is started from here: on another host by the remote shell."""
    if process.host in site.here:
        return process
    if process.client is None:  # its standard input is its own
        argv = _wrapped(site, "gluon_esgd.launch.relay", [], process.argv)
    else:
        argv = _wrapped(site, "gluon_esgd.launch.rank", ["--control"], spec.command)
    words = remote_argv(spec.remote_shell, process.host, site.cwd, process.env, argv)
    return replace(process, argv=tuple(words), remote=True)


def _user_env(spec: JobSpec, site: Site) -> Dict[str, str]:
    return {name: site.environ[name] if text is None else text for name, text in spec.env}


def _settings(spec: JobSpec, site: Site, client: int = 0) -> Settings:
    """Return what the processes of a client read; stations read those of client 0."""
    values = {name: getattr(spec, name) for name in ("rule", "interval", "alpha", "beta", "lazy")}
    values.update(
        job_dir=site.job_dir,
        client=client,
        num_clients=spec.clients + len(site.added),
        client_size=spec.client_size,
        num_servers=spec.num_servers,
        station=_socket(spec, site, client) if spec.num_servers else None,
        places=_places(spec, site, client),
        bind=spec.bind,
        compression=spec.compression or site.base.compression,
        start_timeout_s=spec.start_timeout_s or site.base.start_timeout_s,
        grace_s=spec.grace_s,
        center_snapshot_s=spec.center_snapshot_s or site.base.center_snapshot_s,
    )
    return replace(site.base, **values)


def _socket(spec: JobSpec, site: Site, client: int) -> str:
    return socket_path(site.job_dir, leader_at(spec, client, site.added))


def socket_path(job_dir: str, number: int) -> str:
    """Return where the station of a host listens."""
    return f"{job_dir}/state/host{number}.sock"


def _workers(spec: JobSpec, client: int) -> range:
    """The workers that are started together with `client`."""
    if spec.is_split:
        return range(spec.workers)
    return range(client * spec.client_size, (client + 1) * spec.client_size)


def _places(spec: JobSpec, site: Site, client: int) -> str:
    """Return place/workers of each rank, counted over all workers of the job on its machine."""
    machines = workers_at(spec, site.added)
    return ";".join(
        f"{machines[:w].count(machines[w])}/{machines.count(machines[w])}"
        for w in _workers(spec, client)
    )


def show(processes: Sequence[Process]) -> str:
    """Return the plan as text: for each process its host, environment and command."""
    text = "\n".join(line for process in processes for line in _lines(process))
    return text.encode("utf-8", "backslashreplace").decode()  # file names may be no text


def _lines(process: Process) -> List[str]:
    env = [] if process.remote else [f"    {n}={shlex.quote(v)}" for n, v in process.env.items()]
    command = " ".join(shlex.quote(word) for word in process.argv)
    return [f"{process.name} on {process.host}, log {process.log}", *env, f"    {command}", ""]
