"""What generations are told of the job, and where their messages go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Sequence

__all__ = ["Outside", "Terms"]

Message = Dict[str, Any]


@dataclass(frozen=True)
class Terms:
    """What does not change in a job.

    Attributes
    ----------
    clients : sequence of int
        The clients that the job starts with.
    scheduler_at : int
        Station that runs the scheduler, by the number of its host.
    servers_at : sequence of int
        Station of each server.
    address : str
        By which the scheduler is reached.
    port : int
        Of the first generation's scheduler, the next take the next; 0: any free one.
    secret : str
        Of the job, in hex; leaders get it with "welcome".
    start_limit_s : float
        How long clients may keep each other waiting, and hand-overs the job.
    """

    clients: Sequence[int]
    scheduler_at: int
    servers_at: Sequence[int]
    address: str
    port: int
    secret: str = field(repr=False)
    start_limit_s: float

    @property
    def stations(self) -> List[int]:
        """Stations that run scheduler or servers."""
        return sorted({self.scheduler_at, *self.servers_at})


@dataclass(frozen=True)
class Outside:
    """Where the messages of the launcher go.

    Attributes
    ----------
    to_station : callable
        ``to_station(host, message)``.
    to_leader : callable
        ``to_leader(client, message)``.
    failed : callable
        ``failed(why)``: the job cannot go on.
    note : callable
        ``note(record)`` after each hand-over: generation, why, hard, seconds, source, lost.
    clock : callable
        Seconds, as ``time.monotonic``.
    """

    to_station: Callable[[int, Message], None]
    to_leader: Callable[[int, Message], None]
    failed: Callable[[str], None]
    note: Callable[[Message], None]
    clock: Callable[[], float]
