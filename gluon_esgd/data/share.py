"""Who shares the data: checked numbers, those of the job unless given."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from ..topology import world

__all__ = ["checked_index", "checked_share"]


def checked_index(name: str, value: Any, below: Optional[int] = None) -> int:
    """Return `value` as an int from 0 on, also where numpy made it; bools are none."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else value.__index__()
    except (AttributeError, TypeError):
        number = None
    if number is None:
        raise TypeError(f"{name}={value!r} must be an integer")
    if number < 0 or (below is not None and number >= below):
        upper = "" if below is None else f" and below {below}"
        raise ValueError(f"{name}={value!r} must be 0 or more{upper}")
    return int(number)


def checked_share(count: Tuple[str, Any], index: Tuple[str, Any]) -> Tuple[int, int]:
    """Return how many share and which one this is: as given by name, or those of the job."""
    if count[1] is None and index[1] is None:
        return world().num_workers, world().worker_rank
    if count[1] is None or index[1] is None:
        raise ValueError(
            f"{count[0]}={count[1]!r} with {index[0]}={index[1]!r}: give both, or neither for "
            "those of the job"
        )
    of, mine = checked_index(*count), checked_index(*index)
    if mine >= of:
        raise ValueError(f"{index[0]}={mine} must lie from 0 to {count[0]} - 1 = {of - 1}")
    return of, mine
