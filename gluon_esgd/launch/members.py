"""Who takes part in the center: leaders that are connected, and the vectors they registered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Set

__all__ = ["Member", "Members", "Vector"]

Vector = Dict[str, Any]

_ABSENT_S, _MOST_ABSENCES = 30.0, 5  # doubled each time, up to 16 minutes


@dataclass
class Member:
    """What is known of the leader of one client.

    Attributes
    ----------
    client, pid, life : int
        As it said hello: its number, its process, how often its client was started again.
    host : int
        Station that holds its connection.
    connected, finished : bool
        Whether a station holds its connection, and whether it took its leave.
    absent_until : float
        Its agent was not ready in time: until then, by the launcher's clock, no generation waits
        for it, unless it comes back or has a new trainer.
    absences : int
        How often that was so in a row.
    took_part : bool
        Whether it was in a generation. It stays in, also while it has no trainer: it may make the
        next one, for which the others are to wait.
    vectors : dict
        What it registered, by name.
    answered : set of str
        Names for which this connection was told "attached".
    progress : dict
        What it last said of its training.
    """

    client: int
    pid: int
    life: int
    host: int
    connected: bool = True
    finished: bool = False
    absent_until: float = 0.0
    absences: int = 0
    took_part: bool = False
    vectors: Dict[str, Vector] = field(default_factory=dict)
    answered: Set[str] = field(default_factory=set)
    progress: Dict[str, Any] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """Whether generations are to have it."""
        there = self.connected and not self.finished
        return there and (self.took_part or bool(self.vectors))


class Members:
    """All leaders of a job, and the vectors that they have in common.

    Parameters
    ----------
    clients : sequence of int
        The clients that the job is meant to have.
    """

    def __init__(self, clients: Sequence[int]) -> None:
        self.expected: Set[int] = set(clients)
        self.schema: Dict[str, Vector] = {}  # in the order in which agents attach them
        self._all: Dict[int, Member] = {}

    def get(self, client: int) -> Optional[Member]:
        """Return the member, None where it never said hello."""
        return self._all.get(client)

    def hello(self, client: int, pid: int, life: int, host: int) -> None:
        """Enter a leader; one that only lost its connection registers its vectors once more."""
        before = self._all.get(client)
        took_part = before is not None and before.pid == pid and before.took_part
        self._all[client] = Member(client, pid, life, host, took_part=took_part)

    def enter(self, client: int) -> None:
        """Note that a client takes part in a generation."""
        member = self._all[client]
        member.took_part, member.absences = True, 0

    def drop(self, client: int) -> None:
        """Forget a leader."""
        self._all.pop(client, None)

    def at(self, host: int) -> List[Member]:
        """Return the leaders whose connections a station holds."""
        return [member for member in self._all.values() if member.host == host]

    def set_absent(self, client: int, now: float) -> None:
        """Make the next generations without a client; it is asked again after a while."""
        member = self._all[client]
        member.absent_until = now + _ABSENT_S * 2**member.absences
        member.absences = min(member.absences + 1, _MOST_ABSENCES)

    def ask_again(self, now: float) -> None:
        """Count on those again who were late long enough ago."""
        for member in self._all.values():
            if member.absent_until <= now:
                member.absent_until = 0.0

    @property
    def live(self) -> List[int]:
        """Clients that generations are to have."""
        return sorted(client for client, member in self._all.items() if member.live)

    @property
    def present(self) -> List[int]:
        """Those of them whose agents were ready when they were asked to be."""
        return [client for client in self.live if not self._all[client].absent_until]

    def pid(self, client: int) -> int:
        """Return the process of a leader, 0 where it is not connected."""
        member = self._all.get(client)
        return member.pid if member is not None and member.connected else 0

    def with_vector(self, name: str) -> Dict[int, Vector]:
        """Return what the live clients registered by this name, by client."""
        return {k: v[name] for k, v in ((k, self._all[k].vectors) for k in self.live) if name in v}

    def unknown(self) -> List[str]:
        """Return the names that live clients registered and that are not agreed on."""
        names = (name for client in self.live for name in self._all[client].vectors)
        return list(dict.fromkeys(name for name in names if name not in self.schema))

    def forget(self, name: str, client: int) -> None:
        """Drop what a client registered by this name."""
        self._all[client].vectors.pop(name, None)
