"""The algorithms of each collective by name.

An algorithm is a function ``prepare(task)`` that returns ``run(what)``. Every rank of the
communicator calls both, in the same order; `prepare` once, `run` as often as the collective is
made. `what` names the collective in messages, the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from ..communicator import Communicator
from ..node_memory import Mapping
from .operations import Operation

__all__ = [
    "COLLECTIVES",
    "REDUCTIONS",
    "Algorithm",
    "Instead",
    "Prepare",
    "Run",
    "Task",
    "find",
    "names",
    "register",
]

COLLECTIVES = ("allreduce", "broadcast", "reduce_scatter", "allgather")
REDUCTIONS = ("allreduce", "reduce_scatter")

_MODULES = (
    "library",
    "local",
    "ring",
    "chain",
    "shared",
    "hierarchical",
    "cuda",
    "host_staged",
    "nccl",
)


class Instead(Exception):
    """Raised by a ``prepare`` on all ranks alike: it cannot be had here, take another one.

    Parameters
    ----------
    name : str
        The algorithm to take.
    reason : str
        For the log.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name, self.reason = name, reason


@dataclass(frozen=True)
class Task:
    """What this rank brings to a collective, checked and alike on all ranks.

    Attributes
    ----------
    vectors : list of arrays of shape (n,)
        One for each device of this process; contiguous, one type and length. Algorithms for
        host memory get exactly one.
    comm : Communicator
    op : Operation
    count : int
        Vectors of all ranks.
    root : int
        Rank whose vector a broadcast takes.
    home : Mapping or None
        Memory that the ranks of this machine share and in which the vector lies, at the same
        offset on every rank.
    compresses : bool
        Whether floats go from machine to machine as half floats; only where there are several.
    """

    vectors: List[Any]
    comm: Communicator
    op: Operation
    count: int
    root: int = 0
    home: Optional[Mapping] = None
    compresses: bool = False

    @property
    def array(self) -> Any:
        """The one vector, or the first."""
        return self.vectors[0]

    def on_node(self) -> List[np.ndarray]:
        """Return the vectors of all ranks of this machine, by local rank; they share `home`."""
        assert self.home is not None
        start = self.home.locate(self.array)
        assert start is not None
        end = start + self.array.nbytes
        return [part[start:end].view(self.array.dtype) for part in self.home.parts]


Run = Callable[[str], None]
Prepare = Callable[[Task], Run]


@dataclass(frozen=True)
class Algorithm:
    """An entry of the registry.

    Attributes
    ----------
    prepare : callable
    memory : {'host', 'device', 'node'}
        Where the vectors lie that it takes: of this process, on GPUs, or in memory that the
        ranks of a machine share. Reductions of the last two add float16 up in float32.
    compresses : bool
        Whether it can send half floats from machine to machine (`Task.compresses`).
    """

    prepare: Prepare
    memory: str = "host"
    compresses: bool = False


_algorithms: Dict[Tuple[str, str], Algorithm] = {}


def register(
    collective: str, name: str, *, memory: str = "host", compresses: bool = False
) -> Callable[[Prepare], Prepare]:
    """Decorate an algorithm of `collective` to enter it under `name`; see `Algorithm`."""

    def enter(function: Prepare) -> Prepare:
        if (collective, name) in _algorithms:
            raise ValueError(f"{collective} algorithm {name!r} is registered already")
        _algorithms[collective, name] = Algorithm(function, memory, compresses)
        return function

    return enter


def names(collective: str = "allreduce") -> List[str]:
    """Return the names that `collective` takes as its algorithm."""
    _load()
    return sorted(["auto", *(name for owner, name in _algorithms if owner == collective)])


def find(collective: str, name: str) -> Algorithm:
    """Return the algorithm of that name."""
    _load()
    return _algorithms[collective, name]


def _load() -> None:
    for module in _MODULES:
        import_module(f".{module}", __package__)  # it enters its algorithms itself
