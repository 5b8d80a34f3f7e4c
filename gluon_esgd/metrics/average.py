"""Weighted means of the user's own numbers over the ranks of a client."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping

from ..topology import world

__all__ = ["metric_average"]

_ONE = ""  # the name of a value that came without one


def metric_average(value: Any, weight: float = 1.0) -> Any:
    """Return the weighted mean of a number, or of each of several, over the ranks of the client.

    Collective in the client; the result is the same on all its ranks.

    Parameters
    ----------
    value : float or mapping of str to float
        Or NDArrays of one element, which are waited for. The same names on every rank.
    weight : float, default 1
        How much this rank's value counts, as a rule its number of samples. The
        value of a rank with weight 0 is ignored; NaN when all weights are 0.

    Returns
    -------
    float or dict of str to float
        As `value` is.

    Raises
    ------
    ValueError
        On all ranks: something that is no number, names that differ over the ranks, or a
        weight that is negative.
    """
    numbers: Dict[str, float] = {}
    fault = None
    try:
        named = value if isinstance(value, Mapping) else {_ONE: value}
        numbers = {str(name): _number(number) for name, number in named.items()}
        weight = _number(weight)
    except Exception:  # others must not wait for this rank
        fault = f"value={value!r}, weight={weight!r} must be numbers"
    gathered = world().allgather([numbers, None if fault else weight, fault], "metric_average")
    _check_averages(gathered)
    total = sum(w for _, w, _ in gathered)
    means = {
        name: sum(v[name] * w for v, w, _ in gathered if w) / total if total else math.nan
        for name in numbers
    }
    return means if isinstance(value, Mapping) else means[_ONE]


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):  # float() would read them
        raise ValueError
    return float(value.asscalar() if hasattr(value, "asscalar") else value)


def _check_averages(gathered: List[Any]) -> None:
    """What each rank has given, looked at on all ranks alike."""
    names = None
    for rank, (theirs, weight, fault) in enumerate(gathered):
        if fault is not None:
            raise ValueError(f"metric_average: rank {rank}: {fault}")
        names = sorted(theirs) if names is None else names
        if sorted(theirs) != names:
            raise ValueError(
                f"metric_average: rank {rank} gives {sorted(theirs)}, rank 0 gives {names}; "
                "all ranks of a client must give the same names"
            )
        if not weight >= 0:
            raise ValueError(f"metric_average: weight={weight!r} of rank {rank} must be 0 or more")
