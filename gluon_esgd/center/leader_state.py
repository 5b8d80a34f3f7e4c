"""What a leader's threads share of its generations, under one lock, the state's.

The lock is held for looks and assignments, and for messages to sockets that do not block. Whoever
waits for something, or copies vectors, does not hold it.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from ..errors import CenterError
from .flight import Flight
from .generation import Generation
from .memory import Memory
from .servers_link import new_memory

__all__ = ["LeaderState", "Member"]


@dataclass(frozen=True)
class Member:
    """Who the leader is, and what of the job does not change."""

    client: int
    life: int
    sync: bool
    adds_up: bool  # servers add what an exchange pushes as it is, so a center can be added up here


class LeaderState:
    """The state; `changed` guards all of it and is notified after each turn of the control thread.

    Attributes
    ----------
    running : int
        Number of the generation of which this leader is a member; 0 before the first.
    current, preparing : Generation or None
        The agent of the running one, unless it is lost, and that of the next.
    dying : list of Generation
        Those that were dropped and may not be dead yet: they may still write.
    hold : bool or None
        Whether a hold is hard, or None without one.
    held : bool
        Whether the launcher was told that nothing is in flight.
    failure : str or None
        Why there will be no more generations.
    """

    def __init__(self, member: Member, num_clients: int, say: Callable[..., None]) -> None:
        self.changed = threading.Condition()
        self.member, self.num_clients, self.say = member, num_clients, say
        self.place = member.client
        self.secret = ""
        self.welcome = False
        self.running = 0
        self.current: Optional[Generation] = None
        self.preparing: Optional[Generation] = None
        self.dying: List[Generation] = []
        self.hold: Optional[bool] = None
        self.held = False
        self.failure: Optional[str] = None
        self.memories: Dict[str, Memory] = {}
        self.registered: Dict[str, Dict[str, Any]] = {}
        self.attached: Set[str] = set()
        self.refused: Dict[str, str] = {}
        self.offers: Dict[str, Dict[str, Any]] = {}
        self.preferred: Set[str] = set()  # offers that go before a center on disk
        self.filled: Dict[str, bool] = {}  # name to whether it was filled before
        self.starts: Set[str] = set()  # that are pulled, and wait for all others' pulls
        self.left: Set[str] = set()  # whose mailbox is closed; others may still need their center
        self.meets: Set[str] = set()
        self.flights: Dict[str, Flight] = {}
        self.rules: Dict[str, str] = {}  # of the last exchange of each vector
        self._seen: Dict[str, Tuple[int, float]] = {}
        self._owner = os.getpid()

    # For callers: main thread and engine.

    def check_owner(self) -> None:
        """Raise CenterError in a process that was forked from the leader."""
        if os.getpid() != self._owner:
            raise CenterError(
                f"client {self.member.client}: its center belongs to process {self._owner}; "
                "a process forked from it cannot use it"
            )

    def wait(self, true: Callable[[], Any], timeout_s: float) -> bool:
        """Wait, with the lock held by the caller, until `true()`; whether it became so.

        Raises
        ------
        CenterError
            Where there will be no more generations.
        """
        there = self.changed.wait_for(lambda: true() or self.failure, max(0.0, timeout_s))
        if self.failure is not None:
            raise CenterError(f"client {self.member.client}: {self.failure}")
        return bool(there)

    def usable(self, name: str) -> Optional[Generation]:
        """Return the generation that can be asked about vector `name` now, if there is one."""
        current = self.current
        if current is None or self.hold is not None or self.dying:
            return None
        if current.agent.lost is not None or name not in current.memories:
            return None
        return current

    # For the control thread.

    def drop(self, generation: Optional[Generation], why: str) -> None:
        """End an agent; its memory is nobody else's until it is dead."""
        if generation is None:
            return
        generation.drop(why)
        self.dying.append(generation)
        if generation is self.current:
            self.current = None
        if generation is self.preparing:
            self.preparing = None

    def lose(self, generation: Generation, why: str, stall: bool = False) -> None:
        """Tell the launcher that an agent is lost, and drop it."""
        self.drop(generation, why)
        self.say({"say": "lost", "generation": generation.number, "stall": stall, "why": why})

    def memory_of(self, vector: Dict[str, Any]) -> Memory:
        """Return the memory of a vector of the job, a new one if this leader has not attached it.

        Raises
        ------
        ValueError
            Where it is none, or not laid out like that of this leader.
        """
        memory = new_memory(vector["sizes"], vector["chunks"], vector["exact"])
        with self.changed:
            here = self.memories.setdefault(str(vector["name"]), memory)
        if here is not memory:
            memory.close()
            if here.layout != memory.layout:
                raise ValueError(f"vector {vector['name']!r} is laid out in another way here")
        return here

    def forget_all_but(self, names: Set[str]) -> None:
        """Give back what closed mailboxes left, but for vectors that the job still has."""
        with self.changed:
            for name in self.left - names:
                self.left.discard(name)
                self._seen.pop(name, None)
                self.memories.pop(name).close()

    def look_for_centers(self) -> None:
        """Note when the last whole center of each vector came."""
        for name, memory in list(self.memories.items()):
            if self._seen.get(name, (0, 0.0))[0] != memory.version:
                self._seen[name] = memory.version, time.monotonic()

    def centers(self) -> Dict[str, Tuple[Memory, float]]:
        """Return the memory of each vector with a center, and when that came (`time.time`)."""
        now, wall = time.monotonic(), time.time()
        return {
            name: (memory, wall - (now - self._seen[name][1]))
            for name, memory in list(self.memories.items())
            if memory.version and name in self._seen
        }

    def fresh_s(self) -> Optional[float]:
        """Return the age of the oldest of the last whole centers; None where there is none.

        A closed trainer's does not age what the others have.
        """
        seen = {name: since for name, (_, since) in list(self._seen.items())}
        times = [since for name, since in seen.items() if name not in self.left]
        times = times or list(seen.values())
        return time.monotonic() - min(times) if times else None

    @property
    def at_rest(self) -> bool:
        """Whether nothing is in flight, nobody writes to memory, and no shift lies there."""
        if self.dying or (self.current is not None and not self.current.idle):
            return False
        return not any(flight.uses_buffers for flight in self.flights.values())

    def greeting(self) -> List[Dict[str, Any]]:
        """Return what a station that knows nothing has to hear, in order."""
        with self.changed:
            member = self.member
            hello = {"client": member.client, "pid": self._owner, "life": member.life}
            words: List[Dict[str, Any]] = [{"say": "hello", **hello}]
            words += [*self.registered.values(), *self.offers.values()]
            words += [{"say": "pulled", "name": name} for name in self.starts]
            words += [{"say": "meet", "what": what} for what in self.meets]
            if self.preparing is not None and self.preparing.ready:
                words.append({"say": "ready", "generation": self.preparing.number})
            if self.running and self.current is None and self.hold is None:
                lost = {"generation": self.running, "stall": False, "why": "its agent is gone"}
                words.append({"say": "lost", **lost})
            if self.held:
                words.append({"say": "held", "generation": self.running, "fresh": self.fresh_s()})
            return words
