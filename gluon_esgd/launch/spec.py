"""What a job is: a frozen `JobSpec` that checks itself and reports every fault at once."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Optional, Sequence, Tuple

from ..errors import raise_faults
from .faults import all_faults
from .hosts import Host, is_here

__all__ = ["JobSpec"]


@dataclass(frozen=True)
class JobSpec:
    """A job, complete and checked.

    Attributes
    ----------
    command : tuple of str
        What each worker runs.
    workers : int
        Ranks of all clients together.
    clients : int
        Number of clients; divides `workers`.
    servers : int, optional
        Parameter servers; unset: 1 with several clients, else 0. With 0 several clients are one
        MPI job that its ranks split.
    rule, interval, alpha, beta, lazy
        Of the exchange between clients; unset: left to the trainer.
    compression : str, optional
        'fp16': half floats between machines and to the servers.
    hosts : tuple of Host
        Machines in the order in which they are filled; empty: this machine.
    remote_shell : str
        Program, with arguments, that runs a command line on a host.
    env : tuple of (str, str or None)
        Variables for the workers; None passes the launcher's own value on.
    job_dir : str, optional
        Folder of the job; unset: ``.esgd/<time>-<pid>``.
    start_timeout_s : float
        How long all workers may take to start.
    port : int, optional
        Of the first generation's scheduler, the next take the next; unset: free ones.
    max_restarts : int, optional
        How often a client is started again; unset: 3 where it can come back to a center.
    min_clients : int, optional
        With how many clients the job goes on when one is not started again; unset: all.
    center_snapshot_s : float, optional
        How often the center is written to disk; unset: left to the environment.
    grace_s : float
        How long ranks have from a SIGTERM to the launcher to their end.
    resume : bool
        Whether the checkpoints in `job_dir` stay, to go on from.
    bind : {"cores", "none"}
        Whether workers get cores of their own and thread caps.
    mpiexec : str, optional
        Unset: beside the interpreter, then on PATH.
    dry_run : bool
        Only print what would be started.
    faults : sequence of str
        Faults found while reading, to be reported with those found here.

    Raises
    ------
    ValueError
        Lists every fault.
    """

    command: Tuple[str, ...]
    workers: int
    clients: int = 1
    servers: Optional[int] = None
    rule: Optional[str] = None
    interval: Optional[int] = None
    alpha: Optional[float] = None
    beta: Optional[float] = None
    lazy: Optional[int] = None
    compression: Optional[str] = None
    hosts: Tuple[Host, ...] = ()
    remote_shell: str = "ssh"
    env: Tuple[Tuple[str, Optional[str]], ...] = ()
    job_dir: Optional[str] = None
    start_timeout_s: Optional[float] = None
    port: Optional[int] = None
    max_restarts: Optional[int] = None
    min_clients: Optional[int] = None
    center_snapshot_s: Optional[float] = None
    grace_s: float = 30.0
    resume: bool = False
    bind: str = "cores"
    mpiexec: Optional[str] = None
    dry_run: bool = False
    faults: InitVar[Sequence[str]] = ()

    def __post_init__(self, faults: Sequence[str]) -> None:
        raise_faults("command line", [*faults, *all_faults(self)])

    @property
    def client_size(self) -> int:
        """Ranks in each client."""
        return self.workers // self.clients

    @property
    def num_servers(self) -> int:
        """Servers, with the default put in."""
        if self.servers is None:
            return 1 if self.clients > 1 else 0
        return self.servers

    @property
    def is_split(self) -> bool:
        """Whether all clients are ranks of one MPI job, for lack of servers between them."""
        return self.clients > 1 and self.num_servers == 0

    @property
    def needs_mpi(self) -> bool:
        """Whether any process is started by ``mpiexec``."""
        return self.client_size > 1 or self.is_split

    @property
    def host_list(self) -> Tuple[Host, ...]:
        """Hosts, with the default put in: this machine for all."""
        return self.hosts or (Host("localhost", self.workers),)

    @property
    def one_machine(self) -> bool:
        """Whether all processes are on this machine, so that loopback serves them."""
        return all(is_here(host.name) for host in self.host_list)
