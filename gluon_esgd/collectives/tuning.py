"""The table that ``gluon-esgd tune`` wrote, read once: what was fastest on this machine.

``choices`` of the file holds for each shape of a client, ``"1x2"`` (machines x ranks on the
smallest of them), and each collective a list of ``[up to bytes, algorithm]``; ``null`` for bytes
has no end. Above the last bound, and for other shapes, the built-in choices hold.
"""

from __future__ import annotations

import json
import logging
import re
from functools import lru_cache
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ..communicator import Communicator
from ..settings import PREFIX, own_tuning_path, read
from .registry import COLLECTIVES, find, names

__all__ = ["VERSION", "Table", "load", "serves", "shape_of", "tuned"]

_log = logging.getLogger(__name__)

VERSION = 1

Shape = Tuple[int, int]
Steps = List[Tuple[Optional[int], str]]

# A shape that was not measured takes the choices of one with up to so many times its ranks.
_NEAR = 2.0


def shape_of(comm: Communicator) -> Shape:
    """Return how many machines there are, and the ranks on the smallest."""
    return len(comm.nodes), min(len(ranks) for ranks in comm.nodes)


def serves(collective: str, name: str, machines: int) -> bool:
    """Say whether `name` is an algorithm for vectors in host memory on so many machines."""
    if name in ("auto", "local") or name not in names(collective):
        return False
    if name == "shared" and machines > 1:
        return False
    return find(collective, name).memory != "device"


class Table:
    """The choices of a file, checked.

    Parameters
    ----------
    document : dict
        What the file holds.

    Raises
    ------
    ValueError
        Names the place of what is wrong.
    """

    def __init__(self, document: Any) -> None:
        if not isinstance(document, dict) or document.get("version") != VERSION:
            found = document.get("version") if isinstance(document, dict) else None
            raise ValueError(f"version: {found!r} is not {VERSION}, which this library reads")
        choices = _dict(document.get("choices"), "choices")
        self._shapes = {
            _shape(key): dict(_collectives(value, key)) for key, value in choices.items()
        }

    def choose(self, collective: str, nbytes: int, shape: Shape) -> Optional[str]:
        """Return the fastest algorithm, or None where nothing near was measured."""
        near = self._nearest(shape)
        steps = [] if near is None else self._shapes[near].get(collective, [])
        return next((name for bound, name in steps if bound is None or nbytes <= bound), None)

    def _nearest(self, shape: Shape) -> Optional[Shape]:
        """The measured shape of as many machines whose ranks differ by the smallest factor."""
        if shape in self._shapes:
            return shape
        factors = {
            known: max(known[1] / shape[1], shape[1] / known[1])
            for known in sorted(self._shapes)
            if known[0] == shape[0]
        }
        near = min(factors, key=lambda known: factors[known], default=None)
        return near if near is not None and factors[near] <= _NEAR else None


def load(path: str) -> Tuple[Table, Dict[str, Any]]:
    """Return the table in the file `path`, and all that the file holds.

    Raises
    ------
    OSError
        It cannot be read.
    ValueError
        It is not such a table; the message names the place.
    """
    with open(path, encoding="utf-8") as file:
        try:
            document = json.load(file)
        except RecursionError:
            raise ValueError("nested too deep") from None
        except ValueError as error:  # also where it is not UTF-8
            raise ValueError(f"no JSON: {error}") from None
    return Table(document), document


def tuned(collective: str, nbytes: int, comm: Communicator) -> Optional[str]:
    """Return what the table of this process says; None: nothing."""
    table = _table()
    return None if table is None else table.choose(collective, nbytes, shape_of(comm))


@lru_cache(maxsize=None)
def _table() -> Optional[Table]:
    """The table in the file of the settings, or in the user's own; a fault is told once."""
    given = read().tuning
    path = given or own_tuning_path()
    try:
        return load(path)[0]
    except (OSError, ValueError) as error:
        if given is None and isinstance(error, FileNotFoundError):
            return None
        what = (error.strerror or error) if isinstance(error, OSError) else error
        _log.warning(
            "the table of `gluon-esgd tune` in %s is not used, but the built-in choices: %s; "
            "run `gluon-esgd tune` again, %s",
            path,
            what,
            f"or change {PREFIX}TUNING" if given else "or remove the file",
        )
        return None


def _dict(value: Any, place: str) -> Dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object, got {value!r:.60}")
    return value


def _shape(key: str) -> Shape:
    match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", key)
    if match is None:
        raise ValueError(f"choices: {key!r} must be MACHINESxRANKS, as '1x2'")
    return int(match[1]), int(match[2])


def _collectives(value: Any, key: str) -> Iterator[Tuple[str, Steps]]:
    machines = _shape(key)[0]
    for collective, steps in _dict(value, f"choices, {key}").items():
        place = f"choices, {key}, {collective}"
        if collective not in COLLECTIVES:
            raise ValueError(f"{place}: must be one of {', '.join(COLLECTIVES)}")
        if not isinstance(steps, list):
            raise ValueError(f"{place} must be a list, got {steps!r:.60}")
        yield collective, list(_steps(steps, collective, machines, place))


def _steps(
    steps: List[Any], collective: str, machines: int, place: str
) -> Iterator[Tuple[Optional[int], str]]:
    last = 0
    for number, step in enumerate(steps):
        here = f"{place}, entry {number}"
        if not isinstance(step, list) or len(step) != 2 or not isinstance(step[1], str):
            raise ValueError(f"{here} must be [up to bytes or null, algorithm], got {step!r:.60}")
        bound, name = step
        ascends = type(bound) is int and bound > last
        if not ascends and not (bound is None and number == len(steps) - 1):
            raise ValueError(
                f"{here}: bounds must be ascending whole numbers, null only the last; got {bound!r}"
            )
        if not serves(collective, name, machines):
            serving = ", ".join(n for n in names(collective) if serves(collective, n, machines))
            raise ValueError(
                f"{here}: {name!r:.60} must be one of {serving} for {machines} machine(s)"
            )
        last = bound
        yield bound, name
