"""Collectives that are checked once, over all ranks, and then made as often as wanted."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from ..communicator import Communicator
from ..node_memory import mapping_of
from ..settings import PREFIX
from .adapters import announced
from .agreement import by_rank
from .choice import choose, choose_on_devices, settle
from .devices import is_on_device
from .kernels import MOST
from .operations import COMPRESSIONS, DTYPES, OPERATIONS, WIDE, silence
from .prepared import prepared
from .registry import COLLECTIVES, Run, Task, find, names

__all__ = ["Plan", "plan"]


class Plan:
    """A collective that all ranks have prepared; call it on all ranks, in the same order.

    Attributes
    ----------
    algorithm : str
        The one that was chosen.
    what : str
        Its name in messages.
    """

    def __init__(self, algorithm: str, what: str, comm: Communicator, run: Run) -> None:
        self.algorithm, self.what = algorithm, what
        self._comm, self._run = comm, run

    def __call__(self, what: Optional[str] = None) -> None:
        """Make the collective, in place; collective, waits.

        Parameters
        ----------
        what : str, optional
            A name for this one time, the same on all ranks.

        Raises
        ------
        StallError, CollectiveError
            On the ranks that waited past the limit, for a rank that has left, or for one that
            makes another collective. Nothing is to be trusted afterwards.
        """
        speak = silence()
        try:
            self._run(what or self.what)
        except BaseException:
            self._comm.broken = True
            raise
        finally:
            speak()


def plan(
    collective: str,
    vectors: Any,
    comm: Communicator,
    *,
    op: str = "sum",
    root: int = 0,
    algorithm: str = "auto",
    what: Optional[str] = None,
    compression: Optional[str] = None,
) -> Plan:
    """Prepare a collective in place and check that all ranks bring the same; collective.

    Parameters
    ----------
    collective : {'allreduce', 'broadcast', 'reduce_scatter', 'allgather'}
        What a vector holds afterwards: the reduction of all vectors; the root's; the reduction in
        the rank's own part (`part`) and nothing of use elsewhere; each rank's own part.
    vectors : array or list of arrays, shape (n,)
        This rank's vector, or one for each device of this process, all of which take part and
        are written. Contiguous numpy or CuPy arrays of float16 (added up in float32), float32,
        float64, int32 or int64.
    comm : Communicator
    op : {'sum', 'mean', 'min', 'max', 'weighted_mean', 'weighted_sum'}, default 'sum'
        Means divide by the number of vectors in all (integers are rounded down).
        `weighted_mean`, of an allreduce: the vector's last two elements are a weight and a count
        of errors. They are added up; everything before them is added up and divided by the sum of
        the weights (zeros where it is 0). `weighted_sum` leaves that to `divide_by_weight`.
    root : int, default 0
        Rank whose vector a broadcast takes.
    algorithm : str, default 'auto'
        One of `names`; one rank alone takes ``local``, and on GPUs what ``auto`` takes.
    what : str, optional
        Its name in messages; the collective's own unless given.
    compression : {None, 'fp16'}, default None
        Of an allreduce of float32 or float64: what goes from machine to machine travels as
        half floats, each block of them scaled so that nothing overflows, and is added up in the
        vectors' own type. Tails stay exact. Within one machine it changes nothing.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        On all ranks: an argument that does not do on one of them, or ranks that bring different
        ones; the message names ranks and what each brought.
    CollectiveError
        The communicator was freed, or an earlier collective failed.

    Notes
    -----
    In place of shared memory that a machine lacks messages are used, with one warning; likewise
    ``host_staged`` where GPUs cannot reach each other or NCCL is missing.
    """
    called = what or ("an allreduce" if collective == "allreduce" else f"a {collective}")
    group = list(vectors) if isinstance(vectors, (list, tuple)) else [vectors]
    fault = _fault(collective, group, comm, op, root, algorithm)
    fault = fault or _fault_of_compression(compression, collective, group, comm, algorithm)
    compresses = compression is not None and len(comm.nodes) > 1
    mine: Dict[str, Any] = {"fault": fault}
    on_device = fault is None and is_on_device(group[0])
    choosing = choose_on_devices if on_device else choose
    chooses = algorithm == "auto" or (algorithm == "local" and on_device and comm.size == 1)
    if fault is None:
        home = mapping_of(group[0]) if _is_aligned(group[0]) else None
        mine = {
            **mine,
            "call": f"{collective}, op={op!r}, root={root}, algorithm={algorithm!r}, "
            f"compression={compression!r}",
            "vectors": f"{group[0].dtype} of shape ({group[0].size},)"
            + (" on GPUs" if on_device else ""),
            "count": len(group),
            "home": None if home is None else [home.name, home.locate(group[0])],
            "choice": choosing(collective, group[0].nbytes, comm, compresses) if chooses else None,
        }
    everybody = comm.allgather(mine, f"the plan of {called}")
    _check(called, everybody)
    comm.plans += 1
    # Without a name its number tells it from others, should ranks make them in another order.
    what = what or f"{called} of {mine['vectors']}, plan {comm.plans}"
    if comm.size == 1 and not on_device:
        algorithm = "local"
    elif chooses:
        algorithm = settle([e["choice"] for e in everybody], on_device)
    at_home = all(e["home"] == everybody[0]["home"] is not None for e in everybody)
    task = Task(
        group,
        comm,
        OPERATIONS[op],
        count=sum(e["count"] for e in everybody),
        root=root,
        home=mapping_of(group[0]) if at_home else None,
        compresses=compresses,
    )
    if not group[0].size:
        return Plan(algorithm, what, comm, announced(lambda task: lambda what: None)(task))
    algorithm, run = prepared(collective, algorithm, task)
    return Plan(algorithm, what, comm, run)


def _fault(
    collective: str, group: List[Any], comm: Communicator, op: str, root: int, algorithm: str
) -> Optional[str]:
    """What is wrong with this rank's arguments, in words."""
    if collective not in COLLECTIVES:
        return f"collective={collective!r} must be one of {', '.join(COLLECTIVES)}"
    if op not in tuple(OPERATIONS):  # a list, say, could not be looked up
        return f"op={op!r} must be one of {', '.join(OPERATIONS)}"
    if algorithm not in names(collective):
        return f"algorithm={algorithm!r} must be one of {', '.join(names(collective))}"
    if not isinstance(root, Integral) or not 0 <= root < comm.size:
        return f"root={root!r} must be a rank, 0 to {comm.size - 1}"
    if not group:
        return "vectors is an empty list; give one vector for each device"
    for vector in group:
        said = _fault_of(vector)
        if said is not None:
            return said
    if len({(v.dtype.name, v.size) for v in group}) > 1:
        kinds = ", ".join(f"{v.dtype} of shape ({v.size},)" for v in group)
        return f"vectors must be of one type and length, got {kinds}"
    if len({is_on_device(v) for v in group}) > 1:
        return "vectors must all lie on GPUs or all in host memory; move some of them"
    if is_on_device(group[0]) and len(group) > MOST:
        return f"vectors must be at most {MOST} on the GPUs of one process, got {len(group)}"
    if OPERATIONS[op].tail and (collective != "allreduce" or group[0].size < OPERATIONS[op].tail):
        return f"op={op!r} is for an allreduce of at least 2 elements, got a {collective}"
    if algorithm == "local" and comm.size > 1:
        return f"algorithm='local' is for one rank, and there are {comm.size}; use 'auto'"
    if algorithm in ("auto", "local"):
        return None
    if algorithm == "shared" and len(comm.nodes) > 1:
        return (
            f"algorithm='shared' is for the ranks of one machine, and these are on "
            f"{len(comm.nodes)}; use 'hierarchical' or 'auto'"
        )
    wants_device = find(collective, algorithm).memory == "device"
    if wants_device != is_on_device(group[0]):
        there, here = (
            ("on GPUs", "in host memory") if wants_device else ("in host memory", "on a GPU")
        )
        return (
            f"algorithm={algorithm!r} is for vectors {there}, and these are {here}; use 'auto' "
            f"(or unset {PREFIX}ALGORITHM)"
        )
    return None


def _fault_of_compression(
    compression: Optional[str],
    collective: str,
    group: List[Any],
    comm: Communicator,
    algorithm: str,
) -> Optional[str]:
    """What is wrong with this rank's compression, the other arguments being right."""
    if compression is None:
        return None
    if not isinstance(compression, str) or compression not in COMPRESSIONS:
        return f"compression={compression!r} must be None or {COMPRESSIONS[0]!r}"
    if collective != "allreduce":
        return f"compression={compression!r} is for an allreduce, got a {collective}"
    if group[0].dtype.name not in WIDE:
        return (
            f"compression={compression!r} is for vectors of {' or '.join(WIDE)}, "
            f"got {group[0].dtype}"
        )
    if algorithm == "auto" or len(comm.nodes) == 1 or find(collective, algorithm).compresses:
        return None
    can = [
        name
        for name in names(collective)
        if name != "auto"
        and find(collective, name).compresses
        and (find(collective, name).memory == "device") == is_on_device(group[0])
    ]
    return (
        f"algorithm={algorithm!r} adds up what it sends, so it cannot compress: use 'auto' "
        f"(or unset {PREFIX}ALGORITHM), {' or '.join(map(repr, can))}, or compression=None "
        f"(or unset {PREFIX}COMPRESSION)"
    )


def _is_aligned(vector: Any) -> bool:
    return is_on_device(vector) or vector.flags.aligned


def _fault_of(vector: Any) -> Optional[str]:
    if not isinstance(vector, np.ndarray) and not is_on_device(vector):
        return f"vectors must be numpy or CuPy arrays, got {type(vector).__name__}"
    writeable = is_on_device(vector) or vector.flags.writeable
    if vector.ndim != 1 or not vector.flags.c_contiguous or not writeable:
        return (
            f"vectors must be 1-d, contiguous and writeable, got shape {vector.shape}, "
            f"strides {vector.strides}, writeable={writeable}"
        )
    if vector.dtype.name not in DTYPES or not vector.dtype.isnative:
        return f"vectors must be of {', '.join(DTYPES)}, got {vector.dtype}"
    return None


def _check(what: str, everybody: Sequence[Dict[str, Any]]) -> None:
    """Raise ValueError, on all ranks, for a fault of one of them or for a difference."""
    faults = {r: e["fault"] for r, e in enumerate(everybody) if e["fault"] is not None}
    if faults and len(everybody) == 1:
        raise ValueError(faults[0])
    if faults:
        raise ValueError(f"{what}: {by_rank(faults)}")
    for aspect in ("call", "vectors"):
        said = {r: e[aspect] for r, e in enumerate(everybody)}
        if len(set(said.values())) > 1:
            raise ValueError(
                f"{what}: the ranks bring different ones: {by_rank(said)}; all must bring the same"
            )
