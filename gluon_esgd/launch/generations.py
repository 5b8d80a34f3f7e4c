"""Generations of the parameter server: when the next one starts, and who takes part in it.

A pure state machine: what stations and leaders say comes in, messages to them go out
through callbacks. It starts no process, reads no clock of its own and never waits.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Set, Tuple

from .agreement import Agreement
from .handover import Again, HandOver, told
from .joining import Joining
from .members import Member, Members
from .offers import Offers
from .terms import Outside, Terms

__all__ = ["Generations"]

_MOST_FAILURES = 3  # hand-overs in a row

Message = Dict[str, Any]


class Generations:
    """What the launcher knows of scheduler, servers and leaders, and what it makes of it.

    Parameters
    ----------
    terms : Terms
        What does not change in the job.
    outside : Outside
        Where messages go.
    last : int, default 0
        Number of the last generation that was used before.

    Attributes
    ----------
    running : int
        The running generation, 0 for none.
    crew : dict
        client -> pid of those that take part in it.
    roles : dict
        name -> pid of its scheduler and servers.
    joined : set of int
        Clients that took part in any.
    handover : HandOver, optional
        The attempt under way.
    """

    def __init__(self, terms: Terms, outside: Outside, last: int = 0) -> None:
        self._terms, self._outside = terms, outside
        self.members = Members(terms.clients)
        self.agreement = Agreement(self.members, self._tell)
        self.offers = Offers(self._tell)
        self.running, self.last = 0, last
        self.crew: Dict[int, int] = {}
        self.roles: Dict[str, int] = {}
        self.joined: Set[int] = set()
        self.handover: Optional[HandOver] = None
        self._joining = Joining(outside.clock)
        self._names: Tuple[str, ...] = ()
        # A hand-over that waits for a leader: why, hard, fault.
        self._pending: Optional[Tuple[str, bool, bool]] = None
        self._failures = 0
        self._over = False

    @property
    def sync(self) -> Optional[bool]:
        """Whether the rule is sgd; None until the first leader has said."""
        return self.agreement.sync

    # What comes in. Messages were checked by `words`.

    def from_station(self, host: int, message: Message) -> None:
        """Take what the station of a host said."""
        if not self._over:
            getattr(self, f"_{message['say']}")(host, message)
            self.settle()

    def station_ended(self, host: int, why: str) -> None:
        """A station has ended with its roles and connections; a new one takes its place."""
        if self._over:
            return
        for member in self.members.at(host):
            member.connected = False
        if host in self._terms.stations and self.last:
            if self.handover is not None or self._pending is not None:
                self._attempt_failed(why)
            self._begin(why, hard=self.running > 0)
        self.settle()

    def leave(self, client: int) -> None:
        """The job goes on without this client; a generation tells the others how many they are."""
        took_part = client in self.crew and not self.sync
        self.members.expected.discard(client)
        self.members.drop(client)
        self.offers.forget(client)
        # Where a hand-over is under way it begins again by itself.
        if took_part and self.handover is None and self.members.present and not self._over:
            self._begin(f"client {client} left", False)
        self.settle()

    def enter(self, client: int) -> None:
        """The job is meant to have this client, too."""
        self.members.expected.add(client)

    def give_up(self, why: str) -> None:
        """Let all leaders fail, whatever they wait for, and do nothing any more."""
        for client in self.members.live:
            self._tell(client, {"do": "fail", "why": why})
        self.end()

    def end(self) -> None:
        """Do nothing any more."""
        self._over = True

    def settle(self) -> None:
        """Do what is due; to be called several times a second."""
        steps = (self._follow_members, self._advance, self._join, self._take_vectors, self._answer)
        for step in steps:
            if not self._over:
                step()

    # From stations.

    def _up(self, host: int, message: Message) -> None:
        """Its socket listens; nothing waits for that."""

    def _serving(self, host: int, message: Message) -> None:
        if self.handover is not None and message["generation"] == self.handover.generation:
            self.handover.serving(_role(message), message["pid"], message.get("address"))

    def _ended(self, host: int, message: Message) -> None:
        self._role_lost(message["generation"], message["role"] == "server", message)

    def _role_lost(self, generation: int, is_server: bool, message: Message) -> None:
        why, handover = f"{_role(message)} {message['how']}", self.handover
        if handover is not None and generation == handover.generation:
            self._again(Again(why, handover.hard))
        elif self.running and generation == self.running:
            self.roles.pop(_role(message), None)
            if handover is None:
                self._begin(why, is_server)
            elif is_server and handover.needs_old_servers:
                self._begin(why, True)

    def _gone(self, host: int, message: Message) -> None:
        member = self.members.get(message["client"])
        if member is not None and member.pid == message["pid"]:
            member.connected = False

    def _heard(self, host: int, message: Message) -> None:
        client, said = message["client"], message["message"]
        if client not in self.members.expected:
            return
        if said["say"] == "hello":
            if said["client"] == client:
                self._hello(host, client, said)
            return
        member = self.members.get(client)
        if member is not None and member.connected:
            getattr(self, f"_on_{said['say']}")(member, said)

    # From leaders.

    def _hello(self, host: int, client: int, said: Message) -> None:
        before = self.members.get(client)
        if before is not None and before.pid != said["pid"]:
            self.offers.forget(client)
        self.offers.reconnect(client)
        self.members.hello(client, said["pid"], said["life"], host)
        self._tell(client, {"do": "welcome", "secret": self._terms.secret})

    def _on_register(self, member: Member, said: Message) -> None:
        member.absent_until = 0.0
        self.agreement.register(member, said["vector"], said["sync"], self._outside.clock())

    def _on_detach(self, member: Member, said: Message) -> None:
        """A trainer is closed; a vector that nobody has any more is in no later generation."""
        name = said["name"]
        self.members.forget(name, member.client)
        if not self.members.with_vector(name):
            self.members.schema.pop(name, None)
            self._names = tuple(known for known in self._names if known != name)
            self.offers.drop(name)

    def _on_ready(self, member: Member, said: Message) -> None:
        handover = self.handover
        if handover is not None and said["generation"] == handover.generation:
            handover.ready(member.client)

    def _on_joined(self, member: Member, said: Message) -> None:
        if said["generation"] == self.running:
            self._joining.joined(member.client, said["name"])

    def _on_held(self, member: Member, said: Message) -> None:
        if self.handover is not None and said["generation"] == self.running:
            self.handover.held(member.client, said["fresh"])

    def _on_saved(self, member: Member, said: Message) -> None:
        if self.handover is not None and said["generation"] == self.running:
            self.handover.saved(member.client, said["ok"])

    def _on_seeded(self, member: Member, said: Message) -> None:
        handover = self.handover
        if handover is not None and said["generation"] == handover.generation:
            handover.seeded(member.client)

    def _on_lost(self, member: Member, said: Message) -> None:
        handover, client = self.handover, member.client
        what = "waits in vain" if said["stall"] else "lost its agent"
        why = f"client {client} {what}: {said['why']}"
        if handover is not None and said["generation"] == handover.generation:
            is_seeder = handover.phase == "seeding" and handover.source == client
            self._again(handover.seeder_lost(why) if is_seeder else Again(why, handover.hard))
        elif said["generation"] == self.running and self.crew.get(client) == member.pid:
            self._lost_in_running(client, said["stall"], why)

    def _lost_in_running(self, client: int, stall: bool, why: str) -> None:
        if self.handover is None:
            self._begin(why, stall)
        elif stall and self.handover.needs_old_servers:
            self._begin(why, True)
        if self.handover is not None and not stall:
            self.handover.agentless.add(client)

    def _on_offer(self, member: Member, said: Message) -> None:
        self.offers.offer(member.client, said["name"], said["again"])

    def _on_filled(self, member: Member, said: Message) -> None:
        self.offers.answer(member.client, said["name"], said["ok"])

    def _on_pulled(self, member: Member, said: Message) -> None:
        self.offers.pulled(member.client, said["name"])

    def _on_meet(self, member: Member, said: Message) -> None:
        self.offers.meet(member.client, said["what"])

    def _on_progress(self, member: Member, said: Message) -> None:
        member.progress = {name: value for name, value in said.items() if name != "say"}

    def _on_finished(self, member: Member, said: Message) -> None:
        member.finished = True
        self.offers.forget(member.client)

    # What is due.

    def _follow_members(self) -> None:
        """Begin, or begin again, where those who are there are not those who take part."""
        if self.handover is None:
            self.members.ask_again(self._outside.clock())
        present = {client: self.members.pid(client) for client in self.members.present}
        if self.handover is not None:
            # Under rule sgd the end of a client is that of the job, which the runner sees to.
            if self.handover.members != present and not self.sync:
                self._begin(self._change(self.handover.members, present), self.handover.hard)
        elif self._pending is not None and present:
            self._begin(*self._pending)
        elif self._joining.vector is not None:
            if not self._is_whole and not self.sync:
                self._begin(self._change(self.crew, present), True)
        elif self.running and any(self.crew.get(k) != pid for k, pid in present.items()):
            self._begin(self._change(self.crew, present), False)

    @property
    def _is_whole(self) -> bool:
        """Whether those who take part in the running generation are those who are there."""
        return self.crew == {client: self.members.pid(client) for client in self.members.live}

    def _change(self, before: Mapping[int, int], present: Mapping[int, int]) -> str:
        came = [k for k, pid in present.items() if before.get(k) != pid]
        said = [f"client {k} came{' back' * (k in self.joined)}" for k in came]
        return told([*said, *(f"client {k} left" for k in before if k not in present)])

    def _advance(self) -> None:
        handover = self.handover
        if handover is None:
            return
        again = handover.advance()
        if again is not None:
            self._again(again)
        elif handover.done:
            self._go(handover)
        else:
            self._look_at_limit(handover, handover.why)

    def _look_at_limit(self, handover: HandOver, why: str) -> None:
        limit_s = self._terms.start_limit_s
        if self._outside.clock() - handover.began > limit_s:
            self._fail(f"no generation of the center came up within {limit_s:g} s: {why}")

    def _again(self, again: Again) -> None:
        assert self.handover is not None
        self._look_at_limit(self.handover, again.why)
        self._attempt_failed(again.why)
        for client in again.absent:
            self.members.set_absent(client, self._outside.clock())
        if not self._over:
            self._begin(again.why, again.hard, again.fault)

    def _attempt_failed(self, why: str) -> None:
        self._failures += 1
        if self._failures >= _MOST_FAILURES and not self._over:
            self._fail(
                f"{self._failures} hand-overs of the center in a row failed, the last: {why}"
            )

    def _begin(self, why: str, hard: bool, fault: bool = True) -> None:
        """Begin a hand-over; one that is under way is given up."""
        if self._over:
            return None
        if self.sync and fault:
            return self._fail(f"{why}; under rule sgd there is no center to go on from")
        before, present = self.handover, self.members.present
        # Agents that wait for each other in a vector reach no server.
        hard = hard or (before is not None and before.hard) or self._joining.vector is not None
        self._joining.cancel()
        if before is not None:
            why = before.why if why in before.why else f"{before.why}; then {why}"
            # Also ends the roles before it: in a soft hand-over the old servers are still needed.
            if hard or not self.running:
                self._end_roles(before.generation)
        self.handover = self._pending = None
        if not present:
            self._pending = why, hard, fault
            return
        self.last += 1
        members = {client: self.members.pid(client) for client in present}
        veterans = [client for client in present if self.crew.get(client) == members[client]]
        self.handover = HandOver(
            self._terms, self._outside, self.offers, self.last, self.running, why, hard,
            members, veterans, list(self.members.schema.values()), bool(self.sync), before, fault,
        )  # fmt: skip
        self.handover.begin()

    def _join(self) -> None:
        """Go on with the vector that joins the running generation."""
        name, late = self._joining.finish(), self._joining.late
        if name is not None:
            self._names += (name,)
        elif late:
            clients = told([f"client {client}" for client in late])
            self._begin(f"{clients} did not attach a vector in time", True, fault=not self.sync)

    def _take_vectors(self) -> None:
        """Let the next vector that all registered alike in; the first one needs a generation."""
        if self.handover or self._pending or self._joining.vector:
            return
        name = self.agreement.next(self._wanted())
        if name is not None:
            self._take(name)
        elif not self.running:
            why = self.agreement.missing(
                self._wanted(), self._outside.clock(), self._terms.start_limit_s
            )
            if why is not None:
                self._fail(why)

    def _take(self, name: str) -> None:
        schema = self.members.schema
        if not (self.running and self._is_whole and self._joining.can_take(name, schema)):
            return self._begin(f"{name} is there", False, fault=False)
        self._joining.begin(schema[name], self.crew)
        for client in sorted(self.crew):
            attach = {"do": "attach", "generation": self.running, "vector": schema[name]}
            self._tell(client, attach)

    def _wanted(self) -> Set[int]:
        """Clients that must have registered a vector: at the start all of the job."""
        return set(self.members.live) if self.running else self.members.expected

    def _answer(self) -> None:
        """Tell leaders what they wait for; meetings do not need a center."""
        crew = [k for k, pid in self.crew.items() if self.members.pid(k) == pid]
        if self.handover is None and self.running:
            for client in crew:
                self._tell_attached(client)
            self.offers.settle(self.members.live, crew, self._names)
        self.offers.settle_meetings(self.members.live)

    def _tell_attached(self, client: int) -> None:
        member = self.members.get(client)
        assert member is not None
        for name in self._names:
            if name in member.vectors and name not in member.answered:
                member.answered.add(name)
                self._tell(client, {"do": "attached", "name": name})

    def _go(self, handover: HandOver) -> None:
        """Switch all members to the new generation."""
        self.handover, self.running = None, handover.generation
        self.crew, self.roles = handover.members, handover.roles
        self._names = tuple(vector["name"] for vector in handover.vectors)
        self._joining.reset(self._names)
        self.joined.update(self.crew)
        self._failures = 0
        if self.sync:
            self.offers.lose()
        expected = self.members.expected
        for client in sorted(self.crew):
            self.members.enter(client)
            place = sum(other < client for other in expected)
            go = {"do": "go", "generation": self.running, "num_clients": len(expected)}
            self._tell(client, {**go, "place": place})
        self._end_roles(self.running - 1)
        self._outside.note(handover.record(self._outside.clock()))

    def _end_roles(self, generation: int) -> None:
        if generation < 1:
            return
        for host in self._terms.stations:
            self._outside.to_station(host, {"do": "end", "generation": generation})

    def _tell(self, client: int, message: Message) -> None:
        if self.members.pid(client):
            self._outside.to_leader(client, message)

    def _fail(self, why: str) -> None:
        self.give_up(why) if self.sync else self.end()
        self._outside.failed(why)


def _role(message: Message) -> str:
    return "scheduler" if message["role"] == "scheduler" else f"server {message['index']}"
