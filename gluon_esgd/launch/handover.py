"""One attempt to hand the center over to the next generation, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from .offers import Offers
from .terms import Outside, Terms

__all__ = ["Again", "HandOver", "told"]

PREPARE_S = 30.0
HOLD_S = 2.5
SAVE_S = 2.0  # for each that is asked
SEED_S = 10.0

Message = Dict[str, Any]


@dataclass(frozen=True)
class Again:
    """An attempt that failed.

    Attributes
    ----------
    why : str
        What went wrong.
    hard : bool
        Whether the old servers are given up.
    absent : tuple of int
        Clients to go on without.
    fault : bool
        Whether a process was lost; else something was late only, and may be tried again under
        any rule.
    """

    why: str
    hard: bool
    absent: Tuple[int, ...] = ()
    fault: bool = True


class HandOver:
    """An attempt. It begins with the scheduler and is done when the new center is whole.

    Parameters
    ----------
    terms, outside, offers
        Of the job.
    generation, old : int
        The generation that is prepared, and the running one, 0 for none.
    why, hard
        The reason, and whether the old servers are given up.
    members : dict
        client -> pid of who takes part.
    veterans : list of int
        Those of them who take part in the running generation.
    vectors : list of dict
        What agents attach, in this order.
    sync : bool
        Rule sgd: there is no center to hand over.
    before : HandOver, optional
        The failed attempt that this one repeats.
    fault : bool, default True
        Whether something is amiss, or a client came; else there is only a new vector.
    """

    def __init__(
        self,
        terms: Terms,
        outside: Outside,
        offers: Offers,
        generation: int,
        old: int,
        why: str,
        hard: bool,
        members: Mapping[int, int],
        veterans: Sequence[int],
        vectors: Sequence[Message],
        sync: bool,
        before: Optional[HandOver] = None,
        fault: bool = True,
    ) -> None:
        self._terms, self._outside, self._offers, self._sync = terms, outside, offers, sync
        self.generation, self.old, self.why, self.hard = generation, old, why, hard
        self.members, self.veterans, self.vectors = dict(members), list(veterans), list(vectors)
        self.fault: bool = fault or (before is not None and before.fault)
        now = outside.clock()
        self.began: float = before.began if before else now
        # A center that was pulled while all held stays whole: nobody has exchanged since.
        self.saved_by: Optional[Tuple[int, int]] = before.saved_by if before else None
        self.poor: Set[int] = set(before.poor) if before else set()  # could not seed
        self.agentless: Set[int] = set(before.agentless) if before else set()
        self.roles: Dict[str, int] = {}
        self.source: Optional[int] = None
        self.lost: Optional[str] = None
        self.phase = "preparing"
        self._limit_s = PREPARE_S if old else terms.start_limit_s
        self._limit = now + self._limit_s
        self._ready: Set[int] = set()
        self._held: Dict[int, Optional[float]] = {}
        self._asked: List[int] = []
        self._answer: Optional[bool] = None
        self._names: List[str] = []
        self._seeded = False

    def begin(self) -> None:
        """Have the scheduler served, which sets everything off."""
        if self.hard:
            self._hold()
        port = self._terms.port and self._terms.port + self.generation - 1
        where = {"index": 0, "host": self._terms.address, "port": port if port < 65536 else 0}
        self._serve(self._terms.scheduler_at, role="scheduler", **where)

    # What comes in.

    def serving(self, name: str, pid: int, address: Optional[str]) -> None:
        """A role was forked; the scheduler's has an address."""
        self.roles[name] = pid
        if address is None or self.phase != "preparing":
            return
        for index, host in enumerate(self._terms.servers_at):
            self._serve(host, role="server", index=index, scheduler=address)
        for place, client in enumerate(sorted(self.members)):
            self._outside.to_leader(client, self._prepare(place, address))

    def ready(self, client: int) -> None:
        """The agent of a client is up."""
        self._ready.add(client)

    def held(self, client: int, fresh: Optional[float]) -> None:
        """Nothing of a client is in flight; its last whole center is `fresh` seconds old."""
        # Leaders say it at different moments: what counts is when the center came.
        self._held[client] = None if fresh is None else self._outside.clock() - fresh

    def saved(self, client: int, ok: bool) -> None:
        """A client has, or has not, pulled the old center."""
        if self.phase == "saving" and self._asked[-1:] == [client]:
            self._answer = ok

    def seeded(self, client: int) -> None:
        """A client has put the center onto the new servers."""
        self._seeded = self._seeded or client == self.source

    @property
    def needs_old_servers(self) -> bool:
        """Whether this attempt still counts on the center of the running generation."""
        return not self.hard and self.phase != "seeding" and self.saved_by is None

    # What goes on.

    def advance(self) -> Optional[Again]:
        """Do what is due; `done` tells the end. Return why it has to begin again, if so."""
        phase = ""
        while phase != self.phase:
            phase = self.phase
            again: Optional[Again] = getattr(self, f"_{phase}")()
            if again is not None:
                return again
        return None

    @property
    def done(self) -> bool:
        """Whether the new generation can be switched to."""
        return self.phase == "done"

    def record(self, now: float) -> Message:
        """Return what is told and kept of this hand-over."""
        return {
            "generation": self.generation,
            "why": self.why,
            "hard": self.hard,
            "fault": self.fault,
            "seconds": round(now - self.began, 3),
            "source": self.source,
            "lost": self.lost,
        }

    def _preparing(self) -> Optional[Again]:
        if self._ready >= set(self.members) and not self._missing_roles():
            self._enter("holding", HOLD_S)
            self._hold()
        elif self._is_late():
            return self._not_ready()
        return None

    def _missing_roles(self) -> List[str]:
        wanted = ["scheduler", *(f"server {k}" for k in range(len(self._terms.servers_at)))]
        return [name for name in wanted if name not in self.roles]

    def _not_ready(self) -> Again:
        limit, missing = f"within {self._limit_s:g} s", self._missing_roles()
        if missing:
            return Again(f"{told(missing)} did not start {limit}", self.hard, fault=not self._sync)
        late = [client for client in sorted(self.members) if client not in self._ready]
        names = told([f"client {client}" for client in late])
        why = f"no agent of {names} was ready {limit}"
        if self._sync:  # it cannot do without anybody
            return Again(why, self.hard, fault=False)
        return Again(why, self.hard, tuple(late) if self.old and self._ready else ())

    def _holding(self) -> None:
        if set(self._held) >= set(self.veterans) or self._is_late():
            self._offers.interrupt()
            self._names = [v["name"] for v in self.vectors if v["name"] in self._offers.filled]
            self._enter("saving" if self._names and not self._sync else "done", 0.0)

    def _saving(self) -> None:
        if self._answer and self._asked:
            self.saved_by = self._asked[-1], self.members[self._asked[-1]]
        if self.saved_by is not None and self.members.get(self.saved_by[0]) == self.saved_by[1]:
            return self._seed_by(self.saved_by[0])
        if self._asked and self._answer is None and not self._is_late():
            return None
        left = [client for client in self._candidates() if client not in self._asked]
        if not left:
            return self._seed_by(self._freshest(), saved=False)
        self._asked.append(left[0])
        self._answer, self._limit = None, self._outside.clock() + SAVE_S
        save = {"do": "save", "generation": self.old, "names": self._names}
        self._outside.to_leader(left[0], save)
        return None

    def _candidates(self) -> List[int]:
        """Who may pull from the old servers; those whose agent is gone, or who are late, last."""
        if self.hard:
            return []
        return sorted(self.veterans, key=lambda k: (k in self.agentless, k not in self._held, k))

    def _freshest(self) -> Optional[int]:
        known = {k: came for k, came in self._held.items() if came is not None}
        there = [client for client in known if client in self.members]
        return min(there, key=lambda k: (k in self.poor, -known[k], k), default=None)

    def _seed_by(self, client: Optional[int], saved: bool = True) -> None:
        self.source = client
        if client is None:
            self.lost = f"the center of {told(self._offers.lose())}, which no client holds"
            return self._enter("done", 0.0)
        self.lost = None if saved else "exchanges since it was pulled may be lost"
        self._enter("seeding", SEED_S)
        seed = {"do": "seed", "generation": self.generation, "names": self._names}
        self._outside.to_leader(client, seed)

    def _seeding(self) -> Optional[Again]:
        if self._seeded:
            self._enter("done", 0.0)
        elif self._is_late():
            return self.seeder_lost(f"client {self.source} did not seed within {SEED_S:g} s")
        return None

    def seeder_lost(self, why: str) -> Again:
        """Begin again with another seeder first."""
        assert self.source is not None
        self.poor.add(self.source)
        self.saved_by = None
        return Again(why, True)

    def _done(self) -> None:
        """The last phase."""

    def _enter(self, phase: str, limit_s: float) -> None:
        self.phase, self._limit = phase, self._outside.clock() + limit_s

    def _is_late(self) -> bool:
        return self._outside.clock() > self._limit

    # What goes out.

    def _hold(self) -> None:
        hold = {"do": "hold", "generation": self.old, "hard": self.hard}
        for client in self.veterans:
            if client not in self._held:
                self._outside.to_leader(client, hold)

    def _serve(self, station: int, **what: Any) -> None:
        counts = {"num_clients": len(self.members), "num_servers": len(self._terms.servers_at)}
        what = {"do": "serve", "generation": self.generation, **what, **counts}
        self._outside.to_station(station, what)

    def _prepare(self, place: int, address: str) -> Message:
        return {
            "do": "prepare",
            "generation": self.generation,
            "scheduler": address,
            "client": place,
            "num_clients": len(self.members),
            "num_servers": len(self._terms.servers_at),
            "vectors": self.vectors,
        }


def told(names: Sequence[str]) -> str:
    """Return names as a sentence has them."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
