"""Who am I: the place of this process in its client, its machine and the job.

Nothing else in the package names ``COMM_WORLD``. A world of one rank needs no
MPI and does not load it.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Callable, ContextManager, Iterator, List, Mapping, Optional, Type

from .communicator import Communicator
from .errors import CenterError, TopologyError
from .mpi_job import check_split, divide, initialized, mismatch, under_mpi
from .settings import SIZE_VARIABLES, Settings, read
from .watch import reported

__all__ = ["World", "world"]


# Before an abort: mpiexec drops what it has not read yet, and other ranks may
# be about to say the same error.
_LAST_WORDS_S = 1.0


@dataclass(frozen=True)
class World:
    """The place of this process.

    Attributes
    ----------
    client, num_clients : int
        Number of this process's client, and how many the job has.
    rank, size : int
        This process in its client, and how many it has.
    local_rank, local_size : int
        The same among the client's processes of this machine.
    machine_rank, machine_size : int
        The same among those of all clients, where one MPI job is split into them.
    node_rank, num_nodes : int
        Number of this machine among the client's machines.
    settings : Settings
        What the environment said when the world was made.
    comm, control : Communicator
        Private duplicates over the client's ranks: one for operations in MXNet's
        engine (the trainer's own), one for calls of the main thread.
    leaders : Communicator or None
        Over the leaders of all clients, where they are ranks of one MPI job; None on other ranks
        and where clients are jobs of their own. A client's number is its rank there.
    """

    client: int = 0
    num_clients: int = 1
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    machine_rank: int = 0
    machine_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    settings: Settings = field(default_factory=Settings, repr=False)
    comm: Communicator = field(default_factory=Communicator, repr=False)
    control: Communicator = field(default_factory=Communicator, repr=False)
    leaders: Optional[Communicator] = field(default=None, repr=False)

    @property
    def worker_rank(self) -> int:
        """Number of this process over the whole job."""
        return self.client * self.size + self.rank

    @property
    def num_workers(self) -> int:
        """How many training processes the job has."""
        return self.num_clients * self.size

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0 of its client."""
        return self.rank == 0

    @property
    def is_main(self) -> bool:
        """Whether this is the leader of client 0: the one that prints and saves."""
        return self.is_leader and self.client == 0

    @property
    def is_distributed(self) -> bool:
        """Whether the job has more than one training process."""
        return self.num_workers > 1

    def barrier(self) -> None:
        """Return when every rank of the client has come here; collective in the client."""
        self.control.barrier()

    def broadcast(self, value: Any) -> Any:
        """Return the leader's `value`, anything JSON can say; collective in the client."""
        return self.allgather(value if self.is_leader else None)[0]

    def allgather(self, value: Any, what: str = "world().allgather") -> List[Any]:
        """Return each rank's `value` by rank, anything JSON can say; collective in the client.

        Messages call it `what`, the same on all ranks.
        """
        return self.control.allgather(value, what)

    def on_leader(self, action: Callable[[], None], what: str = "world().on_leader") -> None:
        """Run `action` on the leader only; collective in the client. It is reported if it lasts.

        Parameters
        ----------
        action : callable
        what : str
            Its name in messages, the same on all ranks.

        Raises
        ------
        Exception
            On the leader, what `action` raised.
        CenterError
            On the other ranks, with the same text.
        """
        failure = None
        if self.is_leader:
            try:
                with self.reported(what):
                    action()
            except Exception as error:
                failure = error
        said = None if failure is None else str(failure)
        text = self.control.allgather(said, what)[0]
        if failure is not None:
            raise failure
        if text is not None:
            raise CenterError(text)

    def meet_clients(self, what: str) -> None:
        """Return when all clients of a split world have come to `what`; collective in the job.

        Where clients are jobs of their own they go their own ways: it does nothing.

        Raises
        ------
        CenterError, CollectiveError
            On all ranks of a client that waited past the limit or came to something else.
        """
        if self.settings.is_split:
            self.on_leader(lambda: self.leaders.barrier(what) if self.leaders else None, what)

    def reported(self, what: str) -> ContextManager[None]:
        """Log, while the block lasts long, that the leader waits in `what`; on the leader only.

        For waits that are not for the ranks of the client, which have limits of their own.
        """
        others = "other clients" if self.leaders is not None else "agent, servers or other clients"
        return reported(
            lambda: f"client {self.client}: rank 0 waits in {what}, for {others}",
            self.settings.stall_warning_s,
        )

    @property
    def _in_mpi(self) -> bool:
        return self.size > 1 or self.leaders is not None

    @property
    def mpi_is_over(self) -> bool:
        """Whether the script has called ``MPI.Finalize`` itself."""
        if not self._in_mpi:
            return False
        from mpi4py import MPI

        return bool(MPI.Is_finalized())

    def abort(self) -> None:
        """End this process now, and with it all ranks of its MPI job; never returns."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        time.sleep(_LAST_WORDS_S)
        if self._in_mpi and self.settings.job_dir is None and not self.mpi_is_over:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(1)
        os._exit(1)  # the launcher's wrapper says which rank it was, and mpiexec ends the others

    def leave(self) -> None:
        """Tell ranks that wait for this one that it has come to its end (not collective)."""
        for comm in self._communicators:
            comm.leave()

    @property
    def broken(self) -> bool:
        """Whether a collective has failed: nothing after it is to be trusted."""
        return any(comm.broken for comm in self._communicators)

    @property
    def _communicators(self) -> List[Communicator]:
        return [comm for comm in (self.comm, self.control, self.leaders) if comm is not None]


_world: Optional[World] = None


def world() -> World:
    """Return the place of this process; the first call is collective over the MPI job.

    That is the client, or all clients where one job is split into them.

    Raises
    ------
    TopologyError
        On every rank, when MPI brings another number of processes than was
        announced, does not allow calls from several threads, or cannot be split
        into as many clients as were asked for.
    SettingsError
        When an environment variable of the library is wrong.
    """
    global _world
    if _world is None:
        _world = _make(read(), os.environ)
    return _world


def _make(settings: Settings, environ: Mapping[str, str]) -> World:
    announced = _announced(settings, environ)
    if settings.client >= settings.num_clients:
        raise TopologyError(
            f"client number {settings.client} is not below the number of clients "
            f"{settings.num_clients}; let `gluon-esgd run` set both"
        )
    if settings.is_split:
        check_split(settings, environ)
    place = settings.client, settings.num_clients
    if announced == 1 and not under_mpi(environ):
        return World(*place, settings=settings)
    with _within(settings.start_timeout_s):
        return _with_all_ranks_that_mpiexec_started(announced, settings)


def _announced(settings: Settings, environ: Mapping[str, str]) -> Optional[int]:
    """How many ranks this MPI job should have by its environment; None: it does not say."""
    texts = [environ[name] for name in SIZE_VARIABLES if name in environ]
    sizes = [int(text) for text in texts if text.isdigit()]
    if settings.client_size is not None:
        sizes.append(settings.client_size * (settings.num_clients if settings.is_split else 1))
    if not sizes:
        return None if under_mpi(environ) else 1
    return max(sizes)


def _with_all_ranks_that_mpiexec_started(announced: Optional[int], settings: Settings) -> World:
    MPI = initialized()
    root = MPI.COMM_WORLD
    if announced is not None and root.size != announced:
        raise TopologyError(mismatch(f"one of {announced} ranks, but MPI sees {root.size}", MPI))
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TopologyError(
            "MPI was initialized without MPI_THREAD_MULTIPLE, which collectives from MXNet's "
            "engine need; leave mpi4py.rc.thread_level at 'multiple'"
        )
    parts = divide(root, settings)
    comm = parts.comm
    made = World(
        client=parts.client,
        num_clients=settings.num_clients,
        settings=settings,
        rank=comm.rank,
        size=comm.size,
        local_rank=comm.local_rank,
        machine_rank=parts.machine_rank,
        machine_size=parts.machine_size,
        local_size=comm.local_size,
        node_rank=comm.node_rank,
        num_nodes=len(comm.nodes),
        comm=comm,
        control=parts.control,
        leaders=parts.leaders,
    )
    if root.size > 1:
        _end_together(made)
    return made


@contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """End the process with a traceback when the block takes longer.

    It waits inside MPI for all ranks, with the interpreter's lock held: only
    a thread that needs no lock can still end it.
    """
    faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_together(made: World) -> None:
    """An uncaught exception or a failed collective on one rank ends all ranks of the MPI job."""
    previous = sys.excepthook

    def hook(
        kind: Type[BaseException], error: BaseException, trace: Optional[TracebackType]
    ) -> None:
        previous(kind, error, trace)
        made.abort()

    def leave() -> None:
        if made.broken:
            made.abort()
        made.leave()

    sys.excepthook = hook
    atexit.register(leave)
