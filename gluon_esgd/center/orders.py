"""What the launcher orders a leader to do, each order as one method of the same name.

The control thread calls them. They return at once; what takes an agent's answer is finished by
`advance`, which is called in each turn.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ..errors import CenterError
from .ends import AgentEnd
from .generation import Generation, Request, Vector
from .leader_state import LeaderState
from .lines import integer, text
from .memory import ACKNOWLEDGED, IDLE, Memory
from .snapshots import Snapshots

__all__ = ["Orders"]

_log = logging.getLogger(__name__)

Message = Dict[str, Any]


class Orders:
    """Obeys the launcher's orders.

    Parameters
    ----------
    state : LeaderState
    new_agent : callable
        ``new_agent(generation, scheduler, client=, num_clients=, num_servers=, secret=)`` forks
        one.
    snapshots : Snapshots, optional
        Where a center may be that an earlier job left.
    """

    def __init__(
        self,
        state: LeaderState,
        new_agent: Callable[..., AgentEnd],
        snapshots: Optional[Snapshots] = None,
    ) -> None:
        self._state, self._new_agent, self._snapshots = state, new_agent, snapshots
        self._latest = 0  # number of the last generation that was prepared
        self._joins: List[str] = []  # vectors that the running generation is to attach
        self._seeds: Optional[List[str]] = None  # asked for, not begun
        self._works: List[Tuple[Sequence[Request], Callable[[bool], None]]] = []
        self._known: Dict[str, Callable[[Message], None]] = {
            "welcome": self._welcome,
            "prepare": self._prepare,
            "attach": self._attach,
            "hold": self._hold,
            "save": self._save,
            "seed": self._seed,
            "go": self._go,
            "attached": self._attached,
            "fill": self._fill,
            "filled": self._filled,
            "started": self._started,
            "refuse": self._refuse,
            "met": self._met,
            "fail": self._fail,
        }

    def obey(self, message: Message) -> None:
        """Obey one message; one that cannot be understood is logged and dropped."""
        try:
            self._known[text(message, "do")](message)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            do = str(message.get("do"))[:20]
            _log.error("an order of the launcher was dropped: %r: %.200r", do, error)
            if do == "prepare" and type(message.get("generation")) is int:
                lost = {"generation": message["generation"], "stall": False}
                self._state.say({"say": "lost", **lost, "why": f"it cannot be made: {error}"[:500]})

    def advance(self) -> None:
        """Finish what has its answers, begin what has waited for its place."""
        state = self._state
        for work in list(self._works):
            requests, then = work
            if all(request.over for request in requests):
                self._works.remove(work)
                then(all(request.done for request in requests))
        self._tell_joined()
        if self._seeds is not None and state.at_rest:
            names, self._seeds = self._seeds, None
            if state.preparing is not None:
                self._begin_seed(state.preparing, names)
        with state.changed:
            if state.hold is not None and not state.held and state.at_rest:
                state.held = True
                state.say({"say": "held", "generation": state.running, "fresh": state.fresh_s()})

    def _tell_joined(self) -> None:
        current = self._state.current
        if current is None:
            self._joins.clear()
            return
        for name in [name for name in self._joins if name in current.memories]:
            self._joins.remove(name)
            self._state.say({"say": "joined", "generation": current.number, "name": name})

    def _ask(
        self,
        generation: Generation,
        command: str,
        names: Sequence[str],
        then: Callable[[bool], None],
        **fields: Any,
    ) -> None:
        """Ask about each of `names`; when all is answered, or lost, say `then` how it went."""
        with self._state.changed:
            try:
                requests = [generation.ask(command, name=name, **fields) for name in names]
            except CenterError:
                then(False)
                return
        self._works.append((requests, then))

    def _welcome(self, message: Message) -> None:
        with self._state.changed:
            self._state.secret, self._state.welcome = text(message, "secret"), True

    def _prepare(self, message: Message) -> None:
        state, number = self._state, integer(message, "generation")
        if number <= max(self._latest, state.running):
            return
        members = {n: integer(message, n) for n in ("client", "num_clients", "num_servers")}
        vectors = [self._vector(vector) for vector in message["vectors"]]
        scheduler = text(message, "scheduler")
        self._latest, self._seeds = number, None
        state.forget_all_but({name for name, _, _ in vectors})
        with state.changed:
            state.drop(state.preparing, "was replaced by a newer one")
        agent = self._new_agent(number, scheduler, secret=state.secret, **members)
        with state.changed:
            state.preparing = Generation(number, agent, vectors, members["client"])

    def _vector(self, vector: Message) -> Vector:
        return text(vector, "name"), self._state.memory_of(vector), dict(vector["contract"])

    def _attach(self, message: Message) -> None:
        """Let the running generation have a further vector."""
        state = self._state
        if integer(message, "generation") != state.running or state.hold is not None:
            return
        name, memory, contract = self._vector(message["vector"])
        with state.changed:
            if state.current is not None and name not in state.current.memories:
                state.current.attach((name, memory, contract))
                self._joins.append(name)

    def _hold(self, message: Message) -> None:
        state, number, hard = self._state, integer(message, "generation"), bool(message["hard"])
        if state.running and number != state.running:
            return
        with state.changed:
            state.hold, state.held = hard or bool(state.hold), False
            if hard:
                state.drop(state.current, "was dropped with its generation")

    def _save(self, message: Message) -> None:
        state, number = self._state, integer(message, "generation")
        if number != state.running or not state.held:
            return

        def saved(ok: bool) -> None:
            state.say({"say": "saved", "generation": number, "ok": ok})

        current = state.current
        if current is None:
            saved(False)
        else:
            names = message.get("names", list(current.memories))
            self._ask(current, "pull", names, saved, sync=False, rebase=False)

    def _seed(self, message: Message) -> None:
        state, names = self._state, [str(name) for name in message["names"]]
        preparing = state.preparing
        if preparing is None or preparing.number != integer(message, "generation"):
            return
        with state.changed:
            if state.current is not None and (state.hold is None or not state.current.idle):
                state.drop(state.current, "was still at work when the center was handed over")
        self._seeds = names  # once nobody else writes to the memory

    def _begin_seed(self, generation: Generation, names: Sequence[str]) -> None:
        state = self._state

        def seeded(ok: bool) -> None:
            if ok:
                state.say({"say": "seeded", "generation": generation.number})
            elif generation is state.preparing:
                with state.changed:
                    state.lose(generation, "could not seed its generation")

        memories = [generation.memories.get(name) for name in names]
        if any(memory is None or not memory.version for memory in memories):
            with state.changed:
                state.lose(generation, f"this leader has no center of all of {names}")
            return
        for name, memory in zip(names, memories):
            assert memory is not None
            if state.member.adds_up and state.rules.get(name) == "esgd":
                _add_own(memory)
        self._ask(generation, "restore", names, seeded)

    def _go(self, message: Message) -> None:
        state, number = self._state, integer(message, "generation")
        clients, place = integer(message, "num_clients"), integer(message, "place")
        if state.preparing is None or number != state.preparing.number:
            return
        self._joins.clear()
        with state.changed:
            new = state.preparing
            state.drop(state.current, "was replaced by the next generation")
            state.current, state.preparing, state.running = new, None, number
            state.hold, state.held = None, False
            state.num_clients, state.place = clients, place

    def _attached(self, message: Message) -> None:
        with self._state.changed:
            self._state.attached.add(text(message, "name"))

    def _fill(self, message: Message) -> None:
        state, name = self._state, text(message, "name")

        def filled(ok: bool) -> None:
            state.say({"say": "filled", "name": name, "ok": ok})

        generation = state.usable(name)
        if generation is None or name not in state.offers:
            filled(False)
        else:
            self._take_snapshot(name)
            self._ask(generation, "fill", [name], filled)

    def _take_snapshot(self, name: str) -> None:
        """Let the center begin as one that was left on disk, if nobody resumes with another."""
        state = self._state
        if self._snapshots is None or name in state.preferred:
            return
        if self._snapshots.read(name, state.memories[name]):
            _log.info("the center of %r goes on from the one that was on disk", name)

    def _filled(self, message: Message) -> None:
        name = text(message, "name")
        with self._state.changed:
            if name in self._state.offers:
                self._state.filled[name] = bool(message.get("joined", False))

    def _started(self, message: Message) -> None:
        with self._state.changed:
            self._state.starts.discard(text(message, "name"))

    def _refuse(self, message: Message) -> None:
        with self._state.changed:
            self._state.refused[text(message, "name")] = text(message, "why")

    def _met(self, message: Message) -> None:
        with self._state.changed:
            self._state.meets.discard(text(message, "what"))

    def _fail(self, message: Message) -> None:
        with self._state.changed:
            self._state.failure = self._state.failure or text(message, "why")


def _add_own(memory: Memory) -> None:
    """Make the center whole that has this leader's last difference in it, where that is known.

    It was acknowledged, so the servers had it, and no center has been pulled since.
    """
    if memory.stage[1] == ACKNOWLEDGED:
        free = 1 - memory.whole
        np.add(memory.buffers[memory.whole], memory.buffers[free], out=memory.buffers[free])
        memory.set_stage(0, IDLE)
        memory.set_center(memory.version + 1, free)
