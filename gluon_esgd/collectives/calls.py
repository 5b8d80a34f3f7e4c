"""Collectives for one time: checked and made in one call."""

from __future__ import annotations

from typing import Any, Optional

from ..communicator import Communicator
from .parts import part
from .plan import plan

__all__ = ["allgather", "allreduce", "broadcast", "reduce_scatter"]


def allreduce(
    vectors: Any,
    comm: Communicator,
    op: str = "sum",
    algorithm: str = "auto",
    what: Optional[str] = None,
    compression: Optional[str] = None,
) -> None:
    """Replace every vector by the reduction of all, with the same bits on all ranks; collective.

    Parameters, errors : as for `plan`, whose checks are made anew in each call.
    """
    plan(
        "allreduce", vectors, comm, op=op, algorithm=algorithm, what=what, compression=compression
    )()


def broadcast(
    vectors: Any,
    comm: Communicator,
    root: int = 0,
    algorithm: str = "auto",
    what: Optional[str] = None,
) -> None:
    """Replace every vector by that of rank `root`; collective.

    Parameters, errors : as for `plan`, whose checks are made anew in each call.
    """
    plan("broadcast", vectors, comm, root=root, algorithm=algorithm, what=what)()


def reduce_scatter(
    vectors: Any,
    comm: Communicator,
    op: str = "sum",
    algorithm: str = "auto",
    what: Optional[str] = None,
) -> Any:
    """Reduce the vectors of all ranks; each keeps its own part; collective.

    Parameters, errors : as for `plan`, whose checks are made anew in each call.

    Returns
    -------
    array
        This rank's part of its (first) vector; what lies outside of it is of no use any more.
    """
    first = vectors[0] if isinstance(vectors, (list, tuple)) else vectors
    plan("reduce_scatter", vectors, comm, op=op, algorithm=algorithm, what=what)()
    return first[part(first.size, comm.rank, comm.size)]


def allgather(
    vectors: Any, comm: Communicator, algorithm: str = "auto", what: Optional[str] = None
) -> None:
    """Give each rank the parts that the others own; collective.

    Parameters, errors : as for `plan`, whose checks are made anew in each call.
    """
    plan("allgather", vectors, comm, algorithm=algorithm, what=what)()
