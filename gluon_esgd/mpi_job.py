"""From the processes that mpiexec started to communicators: machines, clients, leaders."""

from __future__ import annotations

import os
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .communicator import Communicator, Limits
from .errors import TopologyError
from .inquiry import Inquiry
from .roll_call import RollCall
from .settings import PREFIX, RANK_VARIABLES, Settings

__all__ = ["PATIENCE", "Ranks", "check_split", "divide", "initialized", "mismatch", "under_mpi"]

# For other clients, where the environment sets no limit.
_CLIENTS_LIMIT_S = 600.0
#: Leaders give up a little before the ranks behind them, who then hear which client is missing.
PATIENCE = 0.9


class Ranks(NamedTuple):
    """This process's part in an MPI job; see `World` for what each is."""

    client: int
    comm: Communicator
    control: Communicator
    leaders: Optional[Communicator]
    machine_rank: int
    machine_size: int


def under_mpi(environ: Mapping[str, str]) -> bool:
    """Whether an mpiexec has started this process."""
    return any(name in environ for name in RANK_VARIABLES)


def initialized() -> Any:
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
            raise TopologyError(mismatch(f"one of {size} ranks by Open MPI's mpiexec", MPI))
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def mismatch(what: str, MPI: Any) -> str:
    """Return the words for a process that is not what `what` says it was started as."""
    library = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
    return (
        f"this process was started as {what}: mpi4py uses {library}, and the mpiexec that "
        "started it is probably of another vendor or was not used at all; start with "
        "`gluon-esgd run`, or with the mpiexec that `gluon-esgd doctor` names"
    )


def check_split(settings: Settings, environ: Mapping[str, str]) -> None:
    """Raise TopologyError unless this process can be part of a job that is to be split."""
    asked = f"{PREFIX}NUM_CLIENTS={settings.num_clients}"
    if settings.client > 0:
        raise TopologyError(
            f"{asked} with {PREFIX}CLIENT={settings.client} means clients that are jobs of their "
            "own, which need a scheduler: let `gluon-esgd run` start them, or unset "
            f"{PREFIX}CLIENT to split one MPI job into clients"
        )
    if not under_mpi(environ):
        raise TopologyError(
            f"{asked} splits the ranks of one MPI job into clients, but no mpirun has started "
            f"this process: start with `mpirun -n {2 * settings.num_clients} python ...`, or let "
            "`gluon-esgd run --clients` start the job"
        )


def divide(whole: Any, settings: Settings) -> Ranks:
    """Make the communicators of this process; collective over the mpi4py communicator `whole`.

    Raises
    ------
    TopologyError
        On all ranks: they cannot be divided as the settings say.
    """
    machine = _machine(whole, settings.nodes)
    count = _clients(whole, settings)
    if count == 1:
        comm, control = _pair(whole, machine, settings)
        return Ranks(settings.client, comm, control, None, machine.rank, machine.size)
    client, rank = divmod(whole.rank, whole.size // count)
    ranks, here = (among.Split(client, whole.rank) for among in (whole, machine))
    called = f"client {client} rank {rank} of {ranks.size}"
    comm, control = _pair(ranks, here, settings, called)
    heads, here = (among.Split(rank > 0, whole.rank) for among in (whole, machine))
    leaders = _of_leaders(heads, here, settings) if rank == 0 else None
    return Ranks(client, comm, control, leaders, machine.rank, machine.size)


def _clients(whole: Any, settings: Settings) -> int:
    """Into how many clients all ranks are to be split; 1: they are one client."""
    # mpirun does not hand each variable to ranks on other machines.
    said = whole.allgather(settings.num_clients if settings.is_split else 1)
    count, name = max(said), f"{PREFIX}NUM_CLIENTS"
    if min(said) != count:
        other = next(rank for rank, n in enumerate(said) if n != count)
        raise TopologyError(
            f"{name} is {count} on rank {said.index(count)} and {said[other]} on rank {other}: "
            f"give all ranks the same (Open MPI: mpirun -x {name}; or `gluon-esgd run --clients`)"
        )
    if whole.size % count:
        raise TopologyError(
            f"{name}={count} must divide the number of ranks, and mpirun has started "
            f"{whole.size}: start with `mpirun -n {count}`, or a multiple of it"
        )
    return count


def _machine(whole: Any, declared: Optional[Sequence[int]]) -> Any:
    """The ranks of this machine, as MPI finds them or as they were declared."""
    from mpi4py import MPI

    machine = whole.Split_type(MPI.COMM_TYPE_SHARED, key=whole.rank)
    if declared is None:
        return machine
    if sum(declared) != whole.size:
        raise TopologyError(
            f"{PREFIX}NODES declares machines of {', '.join(map(str, declared))} ranks, "
            f"{sum(declared)} in all, but there are {whole.size}"
        )
    number = next(k for k in range(len(declared)) if whole.rank < sum(declared[: k + 1]))
    return machine.Split(number, machine.rank)


def _nodes(root: Any, node: Any) -> List[Tuple[int, ...]]:
    """The ranks of each machine, machines in the order of their lowest rank."""
    return sorted(set(map(tuple, root.allgather(node.allgather(root.rank)))))


def _pair(
    root: Any, node: Any, settings: Settings, called: Optional[str] = None
) -> Tuple[Communicator, Communicator]:
    """One communicator for the engine and one for the main thread, over the same ranks."""
    limits = Limits(settings.stall_warning_s, settings.stall_abort_s, settings.wait == "spin")
    nodes = _nodes(root, node)
    comm, control = (_communicator(root, node, nodes, limits, called) for _ in range(2))
    comm.beside = control
    return comm, control


def _of_leaders(root: Any, node: Any, settings: Settings) -> Communicator:
    """One for both threads: the main thread comes to it only when the engine is done."""
    limit_s = PATIENCE * (settings.stall_abort_s or _CLIENTS_LIMIT_S)
    limits = Limits(min(settings.stall_warning_s, limit_s), limit_s, settings.wait == "spin")
    return _communicator(root, node, _nodes(root, node), limits, member="client")


def _communicator(
    root: Any,
    node: Any,
    nodes: Sequence[Sequence[int]],
    limits: Limits,
    called: Optional[str] = None,
    member: str = "rank",
) -> Communicator:
    called = called or f"{member} {root.rank} of {root.size}"
    roll_call, peers, inquiry = RollCall.over(node, root.rank), None, None
    if len(nodes) > 1:
        inquiry = Inquiry(root.Dup(), nodes, roll_call)
        everywhere = node.rank < min(map(len, nodes))
        across = root.Split(node.rank if everywhere else root.size, root.rank)
        if everywhere:
            peers = Communicator(across, limits=limits, called=called, member=member)
    return Communicator(
        root.Dup(),
        roll_call,
        limits,
        nodes=nodes,
        node=node.Dup(),
        peers=peers,
        inquiry=inquiry,
        called=called,
        member=member,
    )
