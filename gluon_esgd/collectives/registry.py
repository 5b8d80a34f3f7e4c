"""The algorithms by name, and the one that chooses between them.

An algorithm is a function ``f(array, comm, what)``: `array` is contiguous, 1-d,
of float32 or float64; afterwards every rank's `array` holds the sum over all
ranks, with the same bits on each. Every rank of `comm` calls it. `what` names
the collective in messages.
"""

from __future__ import annotations

from typing import Callable, Dict, List

import numpy as np

from ..communicator import Communicator

__all__ = ["Allreduce", "allreduce", "names", "register"]

Allreduce = Callable[[np.ndarray, Communicator, str], None]

_algorithms: Dict[str, Allreduce] = {}

# Below this size a ring's messages are too short to fill the wire.
_RING_FROM_BYTES = 1 << 20


def register(name: str) -> Callable[[Allreduce], Allreduce]:
    """Decorate an algorithm to enter it under `name`."""

    def enter(function: Allreduce) -> Allreduce:
        if name in _algorithms:
            raise ValueError(f"collective algorithm {name!r} is registered already")
        _algorithms[name] = function
        return function

    return enter


def names() -> List[str]:
    """Return the names that `allreduce` takes."""
    _load()
    return sorted(["auto", *_algorithms])


def allreduce(
    array: np.ndarray, comm: Communicator, algorithm: str = "auto", what: str = "an allreduce"
) -> None:
    """Replace `array` on every rank by the sum over the ranks, in place; collective.

    Parameters
    ----------
    array : ndarray of float32 or float64, shape (n,), contiguous
    comm : Communicator
    algorithm : str, default 'auto'
        One of `names`; the same on every rank. One rank alone takes ``local``.
    what : str, default 'an allreduce'
        Its name in messages; the same on every rank.

    Raises
    ------
    ValueError
        On the rank that brought an unknown name or an array of another kind.
    StallError, CollectiveError
        On the ranks that waited past the limit or for a rank that has left.
    """
    _load()
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(
            f"array must be 1-d, contiguous and writeable, got shape {array.shape}, "
            f"strides {array.strides}, writeable={array.flags.writeable}"
        )
    if array.dtype not in (np.float32, np.float64):
        raise ValueError(f"array must be float32 or float64, got {array.dtype}")
    if algorithm not in _algorithms and algorithm != "auto":
        raise ValueError(f"algorithm={algorithm!r} must be one of {', '.join(names())}")
    comm.enter(what)
    if comm.size == 1:
        algorithm = "local"
    elif algorithm == "auto":
        algorithm = "ring" if array.nbytes >= _RING_FROM_BYTES else "library"
    if array.size:
        _algorithms[algorithm](array, comm, what)
    comm.check_same(what)


def _load() -> None:
    from . import library, local, ring  # noqa: F401 (they enter themselves)
