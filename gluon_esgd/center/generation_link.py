"""A leader's link to the center of a job that the launcher watches over."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, Mapping, NoReturn, Optional, Sequence, Tuple

from ..counters import Counters
from ..errors import CenterError
from .control import Control
from .ends import AgentEnd
from .generation import Request
from .generation_mailbox import GenerationMailbox
from .leader_state import Member
from .lines import encode
from .memory import Memory
from .servers_link import LinkTerms, ServersLink, full_contract
from .snapshots import Snapshots

__all__ = ["GenerationLink"]

_REPORT_S = 1.0


class GenerationLink(ServersLink):
    """A leader's link to the servers of a supervised job; one per process.

    Starts a zygote and a control thread, and returns at once. The launcher says, by the station
    of this machine, which generation of servers there is; nothing that happens to servers,
    scheduler or agent is an error, except under rule 'sgd' (`sync`).

    Parameters
    ----------
    station : str
        Socket of the station.
    terms : LinkTerms
    life : int, default 0
        How often this client was started again.
    snapshot_s : float, optional
        How often the center is written into the job's folder by one of the leaders; each writes it
        when it leaves. Never unless given.
    stall_s : float, optional
        Agent and servers of which no chunk has come or gone for so long are given up;
        ``terms.limit_s`` unless given. A process that has ended is seen at once.
    """

    _fate_s = 0.0  # the control thread waits for no zygote

    def __init__(
        self,
        station: str,
        terms: LinkTerms,
        *,
        life: int = 0,
        snapshot_s: Optional[float] = None,
        stall_s: Optional[float] = None,
    ) -> None:
        super().__init__(terms)
        self._station = station
        self._reported = 0.0
        plain = terms.outer is None or terms.outer.is_plain
        self._control = Control(
            station,
            Member(self.client, life, self.sync, adds_up=plain),
            terms.num_clients,
            self._next_agent,
            stall_s=self.limit_s if stall_s is None else stall_s,
            limit_s=self.limit_s,
            snapshots=self._snapshots(snapshot_s),
        )

    def _snapshots(self, every_s: Optional[float]) -> Optional[Snapshots]:
        if self._job_dir is None or every_s is None or self.sync:
            return None
        return Snapshots(self._job_dir / "checkpoints" / "center", every_s)

    def _next_agent(self, generation: int, scheduler: str, **members: Any) -> AgentEnd:
        """Ask the zygote for the agent of a generation; a zygote that is dead is replaced."""
        if not self._zygote.alive:
            self._zygote.close()
            self._zygote = self._new_zygote()
        self._zygote.hear()
        return self._new_agent(generation, scheduler, generation=generation, **members)

    @property
    def num_clients(self) -> int:
        """How many clients the job is meant to have now."""
        return self._control.state.num_clients

    @property
    def place(self) -> int:
        """How many of them have lower numbers than this one."""
        return self._control.state.place

    @property
    def generation(self) -> int:
        """Number of the generation of which this leader is a member; 0 before the first."""
        return self._control.state.running

    @property
    def agent_pid(self) -> Optional[int]:
        """Process number of the current agent; None where there is none."""
        current = self._control.state.current
        return None if current is None else current.agent.pid

    def wait_ready(self) -> None:
        """Wait until the station is there and has answered.

        Raises
        ------
        CenterError
            If that takes longer than ``start_timeout_s``.
        """
        state = self._control.state
        state.check_owner()
        with state.changed:
            if not state.wait(lambda: state.welcome, self.start_timeout_s):
                raise CenterError(
                    f"client {self.client}: no answer from the station at {self._station} within "
                    f"{self.start_timeout_s:g} s"
                )

    def attach(
        self,
        name: str,
        sizes: Sequence[int],
        chunks: Sequence[Tuple[int, int]],
        contract: Mapping[str, int],
        exact: Sequence[bool] = (),
    ) -> GenerationMailbox:
        """Make the mailbox of one trainer, once a generation of servers knows its vector.

        The launcher compares layout and contract with those of the other clients. See
        `CenterLink.attach` for the parameters.

        Raises
        ------
        CenterError
            On all clients whose contracts differ when the job starts, and on a client that comes
            later and does not match; on those that wait longer than ``start_timeout_s``.
        """
        state = self._control.state
        state.check_owner()
        memory = self._checked_memory(name, sizes, chunks, exact)
        try:
            message = self._registration(name, memory, contract)
        except BaseException:
            memory.close()
            raise
        with state.changed:
            here = state.memories.setdefault(name, memory)
            if here.layout != memory.layout and name in state.left:  # of a trainer that is gone
                state.memories[name] = here = memory
            state.left.discard(name)
            state.registered[name] = message
            state.refused.pop(name, None)
        if here is not memory:  # the launcher refuses it, where it is laid out in another way
            memory.close()
        self._control.say(message)
        self._wait_attached(name)
        mailbox = GenerationMailbox(self, name, here)
        self._mailboxes[name] = mailbox
        return mailbox

    def _registration(self, name: str, memory: Memory, contract: Mapping[str, int]) -> dict:
        sizes, chunks, exact = memory.layout
        vector = {
            "name": name, "sizes": sizes, "chunks": chunks, "exact": exact,
            "contract": full_contract(contract, memory),
        }  # fmt: skip
        message = {"say": "register", "vector": vector, "sync": self.sync}
        try:
            encode({"say": "heard", "client": self.client, "message": message})
        except ValueError as error:
            raise ValueError(
                f"sizes has {len(sizes)} parameters, too many to tell the launcher of: {error}"
            ) from None
        return message

    def _wait_attached(self, name: str) -> None:
        state = self._control.state
        with state.changed:
            there = state.wait(
                lambda: name in state.attached or name in state.refused, self.start_timeout_s
            )
            if not there or name in state.refused:
                del state.registered[name]
                state.left.add(name)
                state.say({"say": "detach", "name": name})
            if name in state.refused:
                raise CenterError(state.refused[name])
        if not there:
            raise CenterError(
                f"client {self.client}: no generation of servers with '{name}' within "
                f"{self.start_timeout_s:g} s; all clients must attach it"
            )

    def report(self, step: int, counters: Counters) -> None:
        """Tell the launcher how far this client is; at most once a second."""
        now = time.monotonic()
        if now - self._reported < _REPORT_S or os.getpid() != self._owner:
            return
        self._reported = now
        self._control.say(
            {
                "say": "progress",
                "step": step,
                "exchanges": counters.exchanges,
                "lost": counters.exchanges_lost,
                "late": counters.exchanges_late,
                "staleness_s": self._control.state.fresh_s(),
            }
        )

    def close(self) -> None:
        """Leave the job cleanly; end agents and zygote. Idempotent.

        Does nothing in a process that was forked from the leader.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._control.close()
        self._close_ends()
        self._control.state.forget_all_but(set())

    # What mailboxes use.

    def _call(self, name: str, what: str, limit_s: float, command: str, **fields: Any) -> None:
        """Ask the current agent about `name` and wait for the answer; if it is lost, the next."""
        state, end = self._control.state, time.monotonic() + limit_s
        state.check_owner()
        with state.changed:
            while (
                state.wait(lambda: state.usable(name), end - time.monotonic())
                and time.monotonic() < end
            ):
                if self._is_done(self._ask_current(name, command, fields), what, end):
                    return
        self._raise_late(what, limit_s)

    def _ask(self, name: str, what: str, limit_s: float, command: str, **fields: Any) -> Request:
        """Ask the current agent about `name`, once there is one; for `_wait_for`."""
        state = self._control.state
        state.check_owner()
        with state.changed:
            if state.wait(lambda: state.usable(name), limit_s):
                return self._ask_current(name, command, fields)
        self._raise_late(what, limit_s)

    def _wait_for(self, request: Request, what: str, limit_s: float) -> None:
        """Wait for the answer to what was asked under rule 'sgd', where no other agent follows."""
        end = time.monotonic() + limit_s
        with self._control.state.changed:
            if self._is_done(request, what, end):
                return
        self._raise_late(what, limit_s)

    def _ask_current(self, name: str, command: str, fields: Dict[str, Any]) -> Request:
        """Ask the agent that is usable, with the lock held; what nobody hears is lost."""
        current, lost = self._control.state.usable(name), Request()
        lost.lost = True
        assert current is not None
        try:
            return current.ask(command, name=name, **fields)
        except CenterError:
            self._control.wake()  # the control thread sees to it
            return lost

    def _is_done(self, request: Request, what: str, end: float) -> bool:
        """Whether it is answered before `end`; waits, with the lock held by the caller."""
        self._control.state.wait(lambda: request.over, end - time.monotonic())
        if request.error is not None:
            raise CenterError(f"client {self.client}: {request.error}")
        if self.sync and request.lost:
            raise CenterError(f"client {self.client}: its agent was lost during {what}")
        return request.done

    def _raise_late(self, what: str, limit_s: float) -> NoReturn:
        state, why = self._control.state, f"no answer within {limit_s:g} s to {what}"
        with state.changed:
            if self.sync and state.current is not None:  # it may be stuck for ever
                state.lose(state.current, why, stall=True)
        raise CenterError(f"client {self.client}: {why}, from any generation of servers")

    def _meet(self, what: str) -> None:
        """Wait until the leaders of all clients that are there have come to `what`."""
        state = self._control.state
        state.check_owner()
        with state.changed:
            state.meets.add(what)
        self._control.say({"say": "meet", "what": what})
        with state.changed:
            try:
                met = state.wait(lambda: what not in state.meets, self.peers_limit_s)
            finally:
                state.meets.discard(what)
        if not met:
            raise CenterError(
                f"client {self.client}: not all clients came within {self.peers_limit_s:g} s to "
                f"{what}"
            )

    def _detach(self, mailbox: GenerationMailbox) -> None:
        if self._mailboxes.pop(mailbox.name, None) is None:
            return
        self._bytes_of_closed += mailbox.bytes_moved
        state, name = self._control.state, mailbox.name
        with state.changed:
            state.registered.pop(name, None)
            state.flights.pop(name, None)
            state.attached.discard(name)
            state.left.add(name)  # its memory stays until a generation comes without it
        if not self._closed:
            self._control.say({"say": "detach", "name": name})
