"""A new vector that joins the running generation, which saves making the next one for it."""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, Optional, Set, Tuple

__all__ = ["Joining"]

_JOIN_S = 10.0  # agents make its keys together; the one that is dead is seen before
# A vector that nobody has any more keeps its memory on servers until a generation is without it.
_MOST_DEAD = 8

Vector = Dict[str, Any]


class Joining:
    """What the agents of the running generation have attached, and the vector they now do.

    Agents make the keys of a vector together, in the same order everywhere: one vector at a
    time, and only where all who take part in the generation are there.

    Parameters
    ----------
    clock : callable
        Seconds.

    Attributes
    ----------
    vector : dict or None
        The one under way.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._attached: Set[str] = set()
        self._left: Set[int] = set()
        self._limit = 0.0
        self.vector: Optional[Vector] = None

    def reset(self, attached: Collection[str]) -> None:
        """Another generation runs, whose agents have attached these."""
        self._attached, self.vector = set(attached), None

    def cancel(self) -> None:
        """The generation is given up, and agents may wait in it for ever."""
        self.vector = None

    def can_take(self, name: str, schema: Collection[str]) -> bool:
        """Whether `name` can join those of `schema`; else the next generation has to take it."""
        return name not in self._attached and len(self._attached - set(schema)) < _MOST_DEAD

    def begin(self, vector: Vector, clients: Collection[int]) -> None:
        """All `clients` are told to attach `vector`."""
        self.vector, self._left = vector, set(clients)
        self._attached.add(vector["name"])
        self._limit = self._clock() + _JOIN_S

    def joined(self, client: int, name: str) -> None:
        """Note that the agent of a client has attached a vector."""
        if self.vector is not None and self.vector["name"] == name:
            self._left.discard(client)

    def finish(self) -> Optional[str]:
        """Return the name of the vector that all have attached, once."""
        if self.vector is None or self._left:
            return None
        name, self.vector = str(self.vector["name"]), None
        return name

    @property
    def late(self) -> Tuple[int, ...]:
        """Who has not attached it in time."""
        is_late = self.vector is not None and self._clock() > self._limit
        return tuple(sorted(self._left)) if is_late else ()
