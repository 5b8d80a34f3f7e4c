"""A mailbox whose center outlives the servers that hold it: generation follows generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Optional

import numpy as np

from ..errors import CenterError
from .face import ExchangeLost
from .flight import ASIDE, BACK, BUSY, FAILED, FLYING, Flight
from .mailbox import Mailbox
from .memory import Memory

if TYPE_CHECKING:
    from .generation_link import GenerationLink

__all__ = ["GenerationMailbox"]

_DYING_S = 0.1  # for the agent of the generation before to be gone


class GenerationMailbox(Mailbox):
    """A mailbox of whatever agent its link has at the time.

    `start_exchange` and `collect` wait for no hand-over; the other calls go on with the next
    generation when theirs is lost, and raise CenterError when their limit has passed. Under rule
    'sgd' there is no center to go on from: there a lost agent is a CenterError.
    """

    def __init__(self, link: GenerationLink, name: str, memory: Memory) -> None:
        super().__init__(name, memory, link.sync)
        self._link, self._state = link, link._control.state
        self._seeded = False

    @property
    def in_flight(self) -> bool:
        """Whether an exchange was started and its shift not yet collected."""
        return self.name in self._state.flights

    def _start(self, rule: str, alpha: float, timeout_s: float) -> bool:
        state = self._state
        state.check_owner()
        with state.changed:
            if state.current is not None and state.hold is None:
                timeout_s = max(timeout_s, _DYING_S)
            state.wait(lambda: state.usable(self.name), timeout_s)
            generation = state.usable(self.name)
            if generation is None:
                return False
            try:
                request = generation.ask(
                    "exchange", name=self.name, rule=rule, alpha=alpha, serial=self._serial
                )
            except CenterError:  # just lost; the control thread sees to it
                self._link._control.wake()
                return False
            state.rules[self.name] = rule
            state.flights[self.name] = Flight(self._serial, rule, self._memory, generation, request)
        return True

    def _collect(self, out: np.ndarray, timeout_s: float) -> bool:
        state = self._state
        state.check_owner()
        with state.changed:
            flight = state.flights[self.name]
            if not state.wait(lambda: flight.state not in (FLYING, BUSY), timeout_s):
                return False
            found = flight.state
            if found == BACK:
                flight.state = BUSY
        if found == BACK:
            self._memory.copy_shift(flight.rule, out)
        elif found == ASIDE:
            assert flight.shift is not None
            np.copyto(out, flight.shift)
        with state.changed:
            del state.flights[self.name]
            waited_for = state.hold is not None
        if waited_for:
            self._link._control.wake()
        who = f"client {self._link.client}"
        if found == FAILED:
            raise CenterError(f"{who}: {flight.error}")
        if found in (BACK, ASIDE):
            return True
        raise ExchangeLost(
            f"{who}: an exchange of '{self.name}' was lost with generation "
            f"{flight.generation.number} of the servers; the weights stay as they are"
        )

    def _seed(self, seeder: bool, resumed: bool) -> bool:
        if self._sync:
            self._link._call(
                self.name, f"the seed of '{self.name}'", self._link.start_timeout_s, "seed",
                seeder=seeder,
            )  # fmt: skip
            return False
        joined = self._offer(resumed)
        self._seeded = True
        self._ask_pull(self._link.start_timeout_s, rebase=True)
        if not joined:
            self._wait_for_pulls()
        return joined

    def _wait_for_pulls(self) -> None:
        """Let no client move the center before all that began with it have pulled it."""
        state, limit_s = self._state, self._link.start_timeout_s
        with state.changed:
            state.starts.add(self.name)
        self._link._control.say({"say": "pulled", "name": self.name})
        with state.changed:
            try:
                there = state.wait(lambda: self.name not in state.starts, limit_s)
            finally:
                state.starts.discard(self.name)
        if not there:
            raise CenterError(
                f"client {self._link.client}: not all clients have taken the start of "
                f"'{self.name}' within {limit_s:g} s"
            )

    def _offer(self, resumed: bool) -> bool:
        """Offer x as the center; return whether there was one already, once there is one."""
        state, limit_s = self._state, self._link.start_timeout_s
        state.check_owner()
        offer = {"say": "offer", "name": self.name, "again": self._seeded}
        with state.changed:
            state.filled.pop(self.name, None)
            state.offers[self.name] = offer
            if resumed or self._seeded:
                state.preferred.add(self.name)
        self._link._control.say(offer)
        with state.changed:
            try:
                if not state.wait(lambda: self._answered, limit_s):
                    raise CenterError(
                        f"client {self._link.client}: no center of '{self.name}' within "
                        f"{limit_s:g} s: all {state.num_clients} clients must ask for its seed"
                    )
                if self.name in state.refused:
                    raise CenterError(state.refused[self.name])
                return state.filled.pop(self.name)
            finally:
                del state.offers[self.name]
                state.preferred.discard(self.name)

    @property
    def _answered(self) -> bool:
        return self.name in self._state.filled or self.name in self._state.refused

    def _pull(self, sync: bool, rebase: bool, limit_s: Optional[float]) -> None:
        if sync:
            self._link._meet(f"the pull of '{self.name}'")
        self._ask_pull(self._link.limit_s if limit_s is None else limit_s, rebase)
        if sync:
            self._link._meet(f"the end of the pull of '{self.name}'")

    def _ask_pull(self, limit_s: float, rebase: bool) -> None:
        what = f"a pull of '{self.name}'"
        self._link._call(self.name, what, limit_s, "pull", sync=False, rebase=rebase)

    def _start_reduce(self, first: int, last: int, what: str) -> Callable[[], None]:
        link, what = self._link, f"{what} over {self._link.num_clients} clients"
        request = link._ask(self.name, what, link.peers_limit_s, "reduce", first=first, last=last)
        return lambda: link._wait_for(request, what, link.peers_limit_s)

    def close(self) -> None:
        """Let launcher and agent forget this mailbox. Idempotent."""
        self._link._detach(self)
        self._is_closed = True
