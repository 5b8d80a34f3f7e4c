"""The control thread of a leader: obeys the launcher at once, whatever training does meanwhile.

It alone reads sockets, of the station and of agents. It waits in `poll` only, with no lock.
"""

from __future__ import annotations

import os
import select
import threading
import time
import traceback
import weakref
from typing import Any, Callable, Dict, List, Optional

from .ends import AgentEnd
from .flight import ASIDE, BACK, BUSY, Flight
from .generation import Generation
from .leader_state import LeaderState, Member
from .orders import Orders
from .snapshots import Snapshots
from .station_end import StationEnd

__all__ = ["Control"]

_TURN_S = 0.25  # stalls and a station that is missing are looked for this often
_LEAVE_S = 1.0  # for the last words to the station


class Control:
    """The control thread and what it needs.

    Parameters
    ----------
    path : str
        Socket of the station.
    member : Member
    num_clients : int
        Clients of the job, until the launcher says another number.
    new_agent : callable
        See `Orders`.
    stall_s : float
        An agent from which nothing has come for so long is given up.
    limit_s : float
        Without a station for so long the leader fails.
    snapshots : Snapshots, optional
        For the center on disk.
    """

    def __init__(
        self,
        path: str,
        member: Member,
        num_clients: int,
        new_agent: Callable[..., AgentEnd],
        stall_s: float,
        limit_s: float,
        snapshots: Optional[Snapshots] = None,
    ) -> None:
        self._stall_s, self._limit_s, self._snapshots = stall_s, limit_s, snapshots
        self.state = LeaderState(member, num_clients, self.say)
        self._station = StationEnd(path, self.state.greeting)
        self._orders = Orders(self.state, new_agent, snapshots)
        self._stops = False
        self._forget_in_children()
        self._thread = threading.Thread(target=self._run, name="center control", daemon=True)
        self._thread.start()

    def say(self, message: Dict[str, Any]) -> None:
        """Send `message` to the launcher, soon; what it says must be in the state before."""
        self._station.say(message)

    def wake(self) -> None:
        """Let the thread look at the state now."""
        self._station.wake()

    def _forget_in_children(self) -> None:
        """Let forked children close the station's socket, which is to end with this process."""
        mine = weakref.ref(self._station)

        def forget() -> None:
            station = mine()
            if station is not None:
                station.forget()

        os.register_at_fork(after_in_child=forget)

    def _run(self) -> None:
        try:
            while not self._stops:
                self._turn()
        except BaseException as error:
            traceback.print_exc()
            with self.state.changed:
                self.state.failure = f"its control thread has failed: {error!r}"
                self.state.changed.notify_all()

    def _turn(self) -> None:
        self._poll()
        for message in self._station.pump():
            self._orders.obey(message)
        with self.state.changed:
            for generation in self._generations():
                self._read(generation)
            self._find_stall()
            self._bury()
            self._find_station()
        for flight in list(self.state.flights.values()):
            flight.land()
            self._put_aside(flight)
        self.state.look_for_centers()
        current = self.state.current
        if self._snapshots is not None and current is not None:
            self._snapshots.look(self.state.centers(), current.place)
        self._orders.advance()
        with self.state.changed:
            self.state.changed.notify_all()

    def _generations(self) -> List[Generation]:
        return [g for g in (self.state.current, self.state.preparing) if g is not None]

    def _poll(self) -> None:
        poll = select.poll()
        agents = [g.agent.fileno() for g in [*self._generations(), *self.state.dying]]
        for fd in [*self._station.readers(), *agents]:
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        for fd in self._station.writers():
            poll.register(fd, select.POLLIN | select.POLLOUT)
        poll.poll(1000 * _TURN_S)

    def _read(self, generation: Generation) -> None:
        state, before = self.state, generation.ready
        generation.read()
        lost = generation.agent.lost
        if lost is not None:
            state.lose(generation, f"it {lost}")
        elif generation is state.preparing and generation.ready and not before:
            state.say({"say": "ready", "generation": generation.number})

    def _find_stall(self) -> None:
        """Give up an agent that is stuck, unless it is known to be held or to save."""
        state, current = self.state, self.state.current
        if current is None or state.member.sync or state.held:
            return
        if current.stalled(self._stall_s):
            why = f"nothing came from agent or servers for {self._stall_s:g} s"
            state.lose(current, why, stall=True)

    def _bury(self) -> None:
        for generation in list(self.state.dying):
            if generation.agent.ended:
                generation.agent.close()
                self.state.dying.remove(generation)

    def _find_station(self) -> None:
        if self._station.missing_s > self._limit_s and self.state.failure is None:
            self.state.failure = (
                f"the station of this machine, and with it the launcher, was not there for "
                f"{self._limit_s:g} s: the job has lost its launcher"
            )

    def _put_aside(self, flight: Flight) -> None:
        """Copy a shift that is not collected yet, before the buffers are used again."""
        state = self.state
        with state.changed:
            if flight.state != BACK or state.hold is None:
                return
            flight.state = BUSY
        shift = flight.copied_shift()
        with state.changed:
            flight.shift, flight.state = shift, ASIDE

    def close(self) -> None:
        """Tell the launcher that this client is done, and end the thread and all agents."""
        if self._snapshots is not None:  # it may be the last that has the center
            self.state.look_for_centers()
            self._snapshots.write(self.state.centers())
        self.say({"say": "finished"})
        end = time.monotonic() + _LEAVE_S
        with self.state.changed:
            self.state.changed.wait_for(
                lambda: self._station.is_empty or self.state.failure, _LEAVE_S
            )
        self._stops = True
        self.wake()
        self._thread.join(max(_TURN_S, end - time.monotonic()) + _LEAVE_S)
        for generation in [*self._generations(), *self.state.dying]:
            generation.agent.close()
        self._station.close()
