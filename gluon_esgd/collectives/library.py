"""``library``: what the MPI library itself does, with a bounded wait."""

from __future__ import annotations

import numpy as np

from ..communicator import Communicator
from .registry import register

__all__ = ["allreduce"]


@register("library")
def allreduce(array: np.ndarray, comm: Communicator, what: str) -> None:
    """Sum by ``MPI_Iallreduce``."""
    from mpi4py import MPI

    comm.wait([comm.mpi.Iallreduce(MPI.IN_PLACE, array, MPI.SUM)], what)
