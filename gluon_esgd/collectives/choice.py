"""``auto``: which algorithm a collective takes."""

from __future__ import annotations

from typing import Sequence

from ..communicator import Communicator
from .devices import has_nccl
from .registry import find
from .tuning import tuned

__all__ = ["among_messages", "choose", "choose_on_devices", "default", "settle"]

# Below these sizes it is the number of messages that counts: there the MPI library is ahead. By
# `gluon-esgd tune` on two cores with declared machines (2x2, 3x1, 2x1) under both MPI libraries.
_RING_FROM_BYTES = 256 << 10
_HIERARCHICAL_FROM_BYTES = 64 << 10
# For each machine: a chain is worth it when it has more pieces than places.
_CHAIN_FROM_BYTES = 1 << 20


def choose(collective: str, nbytes: int, comm: Communicator, compresses: bool = False) -> str:
    """Return the algorithm for a vector of `nbytes` in host memory; with `compresses` one that can.

    All ranks take the choice of rank 0, the only one that looks into the table of
    ``gluon-esgd tune``.
    """
    measured = tuned(collective, nbytes, comm) if comm.rank == 0 < comm.size - 1 else None
    if compresses:
        can = measured is not None and find(collective, measured).compresses
        return str(measured) if can else _compressing(comm)
    return measured or default(collective, nbytes, comm)


def _compressing(comm: Communicator) -> str:
    return "hierarchical" if _several_each(comm) else "ring"


def _several_each(comm: Communicator) -> bool:
    return min(len(ranks) for ranks in comm.nodes) > 1


def default(collective: str, nbytes: int, comm: Communicator) -> str:
    """Return the algorithm where nothing was measured."""
    if comm.size == 1:
        return "local"
    if len(comm.nodes) == 1:
        return "shared"
    if collective == "broadcast" and nbytes >= len(comm.nodes) * _CHAIN_FROM_BYTES:
        return "hierarchical" if _several_each(comm) else "chain"
    if collective == "allreduce" and _several_each(comm) and nbytes >= _HIERARCHICAL_FROM_BYTES:
        return "hierarchical"
    return among_messages(collective, nbytes)


def among_messages(collective: str, nbytes: int, compresses: bool = False) -> str:
    """Return the algorithm where there is no shared memory."""
    if compresses:
        return "ring"
    return "ring" if collective != "broadcast" and nbytes >= _RING_FROM_BYTES else "library"


def choose_on_devices(
    collective: str, nbytes: int, comm: Communicator, compresses: bool = False
) -> str:
    """Return the algorithm that this rank would take for vectors of `nbytes` on GPUs."""
    if collective in ("reduce_scatter", "allgather") or compresses:
        return "host_staged"  # NCCL wants equal parts, and adds up in the type that it sends
    if len(comm.nodes) == 1:
        return "cuda"
    return "nccl" if has_nccl() else "host_staged"


def settle(choices: Sequence[str], on_device: bool) -> str:
    """Return the algorithm for all ranks: rank 0's, on GPUs only where all can have it."""
    return "host_staged" if on_device and len(set(choices)) > 1 else choices[0]
