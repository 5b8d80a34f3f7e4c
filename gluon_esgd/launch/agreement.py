"""What all clients of a job must have in common: their vectors, compared as they are registered."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from .handover import told
from .members import Member, Members, Vector
from .words import LONGEST

__all__ = ["Agreement"]

_MOST_BYTES = LONGEST - (1 << 16)  # one message names all vectors of a generation


class Agreement:
    """Lets a vector in when all that are wanted have registered it alike.

    Parameters
    ----------
    members : Members
        Who is there; `Members.schema` gets the vectors that are agreed on.
    tell : callable
        ``tell(client, message)`` reaches a leader.

    Attributes
    ----------
    sync : bool, optional
        Whether the rule is sgd; None until the first leader has said.
    """

    def __init__(self, members: Members, tell: Callable[[int, Dict[str, Any]], None]) -> None:
        self._members, self._tell = members, tell
        self.sync: Optional[bool] = None
        self._known_by: Dict[str, List[int]] = {}
        self._since: Optional[float] = None  # the first registration that is not answered

    def register(self, member: Member, vector: Vector, sync: bool, now: float) -> None:
        """Note what a leader registers; one that differs from what is agreed on is refused."""
        self._since = now if self._since is None else self._since
        self.sync = sync if self.sync is None else self.sync
        name = vector["name"]
        found = self._differences_to_known(member.client, vector)
        size = len(json.dumps([vector, *(v for n, v in self._members.schema.items() if n != name)]))
        if size > _MOST_BYTES:
            found.append(f"all vectors together take {size} bytes to tell, {_MOST_BYTES} at most")
        if sync != self.sync:
            found.insert(0, "rule: some have sgd, others esgd or asgd")
        if found:
            self._refuse([member.client], name, found)
        else:
            member.vectors[name] = vector
            member.answered.discard(name)

    def next(self, wanted: Set[int]) -> Optional[str]:
        """Return the name of a vector that all `wanted` have now registered, if there is one."""
        for name in self._members.unknown():
            have = self._members.with_vector(name)
            if wanted - set(have):
                continue
            found = _differences([(f"client {k}", have[k]) for k in sorted(have)])
            if not found:
                self._members.schema[name] = next(iter(have.values()))
                self._known_by[name] = sorted(have)
                self._since = None
                return name
            self._refuse(sorted(have), name, found)
        return None

    def missing(self, wanted: Set[int], now: float, limit_s: float) -> Optional[str]:
        """Return who keeps the others waiting for longer than `limit_s`, as a sentence."""
        missing = sorted(wanted - set(self._members.live))
        if self._since is None or now - self._since <= limit_s or not missing:
            return None
        names = told([f"client {client}" for client in missing])
        return f"{names} did not come to a trainer within {limit_s:g} s of the first"

    def _differences_to_known(self, client: int, vector: Vector) -> List[str]:
        name, schema = vector["name"], self._members.schema
        if name not in schema:
            return []
        other = next((f"client {k}" for k in self._known_by[name] if k != client), "the center")
        return _differences([(other, schema[name]), (f"client {client}", vector)])

    def _refuse(self, clients: List[int], name: str, found: List[str]) -> None:
        why = f"the clients do not match: {'; '.join(found)}"
        for client in clients:
            self._members.forget(name, client)
            self._tell(client, {"do": "refuse", "name": name, "why": why})


def _differences(vectors: Sequence[Tuple[str, Vector]]) -> List[str]:
    """Return what vectors, each with whose it is, do not have in common; a sentence for each."""
    names = dict.fromkeys(name for _, vector in vectors for name in vector["contract"])
    rows = {name: [(who, v["contract"].get(name)) for who, v in vectors] for name in names}
    found = [_told(name, row) for name, row in rows.items() if len({n for _, n in row}) > 1]
    if not found and any(_layout(vector) != _layout(vectors[0][1]) for _, vector in vectors):
        found.append("sizes and cuts: they are not the same")  # though their checksums are
    return found


def _layout(vector: Vector) -> Any:
    return vector["sizes"], vector["chunks"], vector["exact"]


def _told(name: str, row: Sequence[Tuple[str, Optional[int]]]) -> str:
    others = [who for i, who in enumerate(row) if i == 0 or who[1] != row[0][1]]
    said = (f"{who} has {'none' if value is None else value}" for who, value in others)
    return f"{name}: " + ", ".join(said)
