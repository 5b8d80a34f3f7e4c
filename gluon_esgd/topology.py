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
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple, Type

from .communicator import Communicator, Limits
from .errors import CenterError, TopologyError
from .roll_call import RollCall
from .settings import PREFIX, RANK_VARIABLES, SIZE_VARIABLES, Settings, read

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
    node_rank, num_nodes : int
        Number of this machine among the client's machines.
    settings : Settings
        What the environment said when the world was made.
    comm, control : Communicator
        Private duplicates over the client's ranks: one for operations in MXNet's
        engine (the trainer's own), one for calls of the main thread.
    """

    client: int = 0
    num_clients: int = 1
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    settings: Settings = field(default_factory=Settings, repr=False)
    comm: Communicator = field(default_factory=Communicator, repr=False)
    control: Communicator = field(default_factory=Communicator, repr=False)

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

    def allgather(self, value: Any) -> List[Any]:
        """Return each rank's `value` by rank, anything JSON can say; collective in the client."""
        return self.control.allgather(value, "world().allgather")

    def on_leader(self, action: Callable[[], None]) -> None:
        """Run `action` on the leader only; collective in the client.

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
                action()
            except Exception as error:
                failure = error
        text = self.broadcast(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        if text is not None:
            raise CenterError(text)

    @property
    def mpi_is_over(self) -> bool:
        """Whether the script has called ``MPI.Finalize`` itself."""
        if self.size == 1:
            return False
        from mpi4py import MPI

        return bool(MPI.Is_finalized())

    def abort(self) -> None:
        """End this process now, and with it all ranks of the client; never returns."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        time.sleep(_LAST_WORDS_S)
        if self.size > 1 and self.settings.job_dir is None and not self.mpi_is_over:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(1)
        os._exit(1)  # the launcher's wrapper says which rank it was, and mpiexec ends the others

    def leave(self) -> None:
        """Tell ranks that wait for this one that it has come to its end (not collective)."""
        self.comm.leave()
        self.control.leave()


_world: Optional[World] = None


def world() -> World:
    """Return the place of this process; the first call is collective over the client.

    Raises
    ------
    TopologyError
        On every rank, when MPI brings another number of processes than was
        announced, or does not allow calls from several threads.
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
    place = settings.client, settings.num_clients
    if announced == 1 and not _under_mpi(environ):
        return World(*place, settings=settings)
    with _within(settings.start_timeout_s):
        return _with_all_ranks_that_mpiexec_started(announced, settings)


def _under_mpi(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in RANK_VARIABLES)


def _announced(settings: Settings, environ: Mapping[str, str]) -> Optional[int]:
    """How many ranks this client should have by its environment; None: it does not say."""
    texts = [environ[name] for name in SIZE_VARIABLES if name in environ]
    sizes = [int(text) for text in texts if text.isdigit()]
    if settings.client_size is not None:
        sizes.append(settings.client_size)
    if not sizes:
        return None if _under_mpi(environ) else 1
    return max(sizes)


def _with_all_ranks_that_mpiexec_started(announced: Optional[int], settings: Settings) -> World:
    MPI = _initialized()
    root = MPI.COMM_WORLD
    if announced is not None and root.size != announced:
        raise TopologyError(_mismatch(f"one of {announced} ranks, but MPI sees {root.size}", MPI))
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TopologyError(
            "MPI was initialized without MPI_THREAD_MULTIPLE, which collectives from MXNet's "
            "engine need; leave mpi4py.rc.thread_level at 'multiple'"
        )
    node = _node(root, settings.nodes)
    nodes = _nodes(root, node)
    comm, control = (_communicator(root, node, nodes, settings) for _ in range(2))
    comm.beside = control
    made = World(
        client=settings.client,
        num_clients=settings.num_clients,
        settings=settings,
        rank=root.rank,
        size=root.size,
        local_rank=comm.local_rank,
        local_size=comm.local_size,
        node_rank=comm.node_rank,
        num_nodes=len(nodes),
        comm=comm,
        control=control,
    )
    if root.size > 1:
        _end_together(made)
    return made


def _initialized() -> Any:
    """Return mpi4py's MPI, initialized, unless the mpiexec is of a vendor it cannot talk to."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    if not MPI.Is_initialized():
        # MPICH would abort inside MPI_Init with a message about PMI versions.
        by_open_mpi = "OMPI_COMM_WORLD_SIZE" in os.environ and "PMI_SIZE" not in os.environ
        if by_open_mpi and "Open MPI" not in MPI.Get_library_version():
            size = os.environ["OMPI_COMM_WORLD_SIZE"]
            raise TopologyError(_mismatch(f"one of {size} ranks by Open MPI's mpiexec", MPI))
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


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


def _mismatch(what: str, MPI: Any) -> str:
    library = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
    return (
        f"this process was started as {what}: mpi4py uses {library}, and the mpiexec that "
        "started it is probably of another vendor or was not used at all; start with "
        "`gluon-esgd run`, or with the mpiexec that `gluon-esgd doctor` names"
    )


def _node(root: Any, declared: Optional[Sequence[int]]) -> Any:
    """The ranks of this machine, as MPI finds them or as they were declared."""
    from mpi4py import MPI

    machine = root.Split_type(MPI.COMM_TYPE_SHARED, key=root.rank)
    if declared is None:
        return machine
    if sum(declared) != root.size:
        raise TopologyError(
            f"{PREFIX}NODES declares machines of {', '.join(map(str, declared))} ranks, "
            f"{sum(declared)} in all, but there are {root.size}"
        )
    number = next(k for k in range(len(declared)) if root.rank < sum(declared[: k + 1]))
    return machine.Split(number, machine.rank)


def _nodes(root: Any, node: Any) -> List[Tuple[int, ...]]:
    """The ranks of each machine, machines in the order of their lowest rank."""
    return sorted(set(map(tuple, root.allgather(node.allgather(root.rank)))))


def _communicator(
    root: Any, node: Any, nodes: Sequence[Sequence[int]], settings: Settings
) -> Communicator:
    limits = Limits(settings.stall_warning_s, settings.stall_abort_s, settings.wait == "spin")
    peers = None
    if len(nodes) > 1:
        everywhere = node.rank < min(map(len, nodes))
        across = root.Split(node.rank if everywhere else root.size, root.rank)
        if everywhere:
            peers = Communicator(across, limits=limits, called=f"rank {root.rank} of {root.size}")
    roll_call = RollCall.over(node, root.rank)
    return Communicator(root.Dup(), roll_call, limits, nodes=nodes, node=node.Dup(), peers=peers)


def _end_together(made: World) -> None:
    """An uncaught exception or a failed collective on one rank ends all ranks of the client."""
    previous = sys.excepthook

    def hook(
        kind: Type[BaseException], error: BaseException, trace: Optional[TracebackType]
    ) -> None:
        previous(kind, error, trace)
        made.abort()

    def leave() -> None:
        if made.comm.broken or made.control.broken:
            made.abort()
        made.leave()

    sys.excepthook = hook
    atexit.register(leave)
