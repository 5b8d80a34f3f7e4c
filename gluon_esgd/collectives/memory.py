"""Memory that the ranks of each machine share, for vectors and for what passes through."""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from typing import Any, Callable, List, Optional, Tuple

import numpy as np

from ..communicator import Communicator
from ..node_memory import Mapping, create, reserve
from .agreement import by_rank

__all__ = ["share", "shared_array", "window"]

_log = logging.getLogger(__name__)
_WHAT = "a share of memory"
_windows: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_told: weakref.WeakSet = weakref.WeakSet()


def shared_array(size: int, dtype: Any, comm: Communicator) -> np.ndarray:
    """Make a vector of zeros in memory that the ranks of each machine share; collective.

    Collectives need not copy what lies there. Several vectors may be slices of one.

    Parameters
    ----------
    size : int
        Elements, the same on all ranks.
    dtype : dtype
    comm : Communicator

    Returns
    -------
    ndarray, shape (size,)
        In private memory where a machine has no room: it has logged one warning.

    Raises
    ------
    ValueError
        On all ranks: they ask for different lengths.
    """
    dtype = np.dtype(dtype)
    mapping = share(size * dtype.itemsize, comm)
    if mapping is None:
        return np.zeros(size, dtype)
    return mapping.parts[mapping.own][: size * dtype.itemsize].view(dtype)


def share(nbytes: int, comm: Communicator) -> Optional[Mapping]:
    """Make memory that the ranks of each machine map, `nbytes` for each rank; collective.

    It goes when the last array in it goes, on the last rank; the file is unlinked at once.

    Parameters
    ----------
    nbytes : int
        The same on all ranks; rounded up to whole pages.
    comm : Communicator

    Returns
    -------
    Mapping or None
        None on all ranks where a machine has no room: rank 0 of that machine has logged it.

    Raises
    ------
    ValueError
        On all ranks: they ask for different lengths.
    """
    room = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    if comm.size == 1:
        return Mapping.over(-1, room, 1, 0)
    path, file, fault = None, -1, None
    if comm.local_rank == 0:
        (file, path), fault = _attempt(lambda: create(room * comm.local_size), (-1, None))
    try:
        offers = comm.allgather([nbytes, path], _WHAT)
        _check_lengths([offer[0] for offer in offers])
        here = offers[comm.nodes[comm.node_rank][0]][1]
        if here is not None and comm.local_rank != 0:
            file, fault = _attempt(lambda: os.open(here, os.O_RDWR), -1)
        mapping = None
        if file >= 0:
            # The first path is the name of the memory on all ranks of all machines.
            mapping, fault = _attempt(lambda: _map(file, room, comm, offers[0][1]), None)
        faults = [said for said in comm.allgather(fault, _WHAT) if said is not None]
    finally:
        if file >= 0:
            os.close(file)
        if path is not None:
            os.unlink(path)
    if faults:
        _tell(faults[0], comm)
        return None
    return mapping


def _map(file: int, room: int, comm: Communicator, name: str) -> Mapping:
    """Take memory for the own part, near the core that calls, and map all parts."""
    reserve(file, comm.local_rank * room, room)
    return Mapping.over(file, room, comm.local_size, comm.local_rank, name)


def _attempt(action: Callable[[], Any], otherwise: Any) -> Tuple[Any, Optional[str]]:
    """What `action` returns, and what went wrong in words."""
    try:
        return action(), None
    except OSError as error:
        return otherwise, str(error)


def _check_lengths(lengths: List[int]) -> None:
    if len(set(lengths)) > 1:
        said = by_rank({rank: f"{length} bytes" for rank, length in enumerate(lengths)})
        raise ValueError(
            f"shared_array: the ranks ask for different lengths: {said}; all must ask for the same"
        )


def _tell(fault: str, comm: Communicator) -> None:
    if comm.local_rank == 0 and comm not in _told:
        _told.add(comm)
        _log.warning(
            "no shared memory in /dev/shm: %s; vectors are copied or sent instead, which is "
            "slower; make it larger (mount -o remount,size=..., docker run --shm-size=...)",
            fault,
        )


def window(nbytes: int, comm: Communicator) -> Optional[Mapping]:
    """Return a small share of memory for what passes through inside a collective; collective.

    One for each communicator, made at the first call; see `share`.
    """
    if _windows.get(comm) is None:
        _windows[comm] = share(nbytes, comm)
    return _windows[comm]
