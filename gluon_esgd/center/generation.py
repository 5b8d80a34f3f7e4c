"""One generation as a leader sees it: its agent, what the agent holds, what it was asked."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Deque, Dict, List, Mapping, Optional, Sequence, Tuple

from ..errors import CenterError
from .ends import AgentEnd
from .memory import Memory

__all__ = ["Generation", "Request", "Vector"]

Vector = Tuple[str, Memory, Mapping[str, int]]  # name, memory, contract


class Request:
    """One thing that an agent was asked. At most one of `done`, `error` and `lost` comes true.

    Attributes
    ----------
    done : bool
        It was answered.
    error : str or None
        It was answered with this error.
    lost : bool
        Its agent was lost or dropped before it answered.
    """

    def __init__(self) -> None:
        self.done = self.lost = False
        self.error: Optional[str] = None

    @property
    def over(self) -> bool:
        """Whether no more is to come."""
        return self.done or self.lost or self.error is not None


class Generation:
    """One generation; used under the state's lock, read by the control thread only.

    Parameters
    ----------
    number : int
    agent : AgentEnd
    vectors : sequence of (name, Memory, contract)
        What the agent is to attach, in this order.
    place : int
        Place of this leader among the members.
    """

    def __init__(
        self, number: int, agent: AgentEnd, vectors: Sequence[Vector], place: int = 0
    ) -> None:
        self.number, self.agent, self.place = number, agent, place
        self.memories: Dict[str, Memory] = {}  # that the agent has attached
        self._to_attach: Deque[Vector] = deque(vectors)
        self._attaching: Optional[Request] = None
        self._requests: Dict[int, Request] = {}
        self._mark: List[Any] = []
        self._moved_at = 0.0

    @property
    def ready(self) -> bool:
        """Whether the agent is up and has attached everything."""
        return bool(self.agent.pid) and not self._to_attach and self._attaching is None

    @property
    def idle(self) -> bool:
        """Whether everything was answered."""
        return not self._requests

    def ask(self, command: str, fds: Sequence[int] = (), **fields: Any) -> Request:
        """Ask the agent for something; CenterError where it is lost."""
        request = Request()
        self._requests[self.agent.ask(command, fds, **fields)] = request
        return request

    def attach(self, vector: Vector) -> None:
        """Attach a further vector, after those that were to be attached before."""
        self._to_attach.append(vector)

    def read(self) -> None:
        """Take in what the agent has said, and go on with attaching."""
        self.agent.hear()
        self._take()
        try:
            if self.agent.wait_ready(0.0):
                self._attach()
        except CenterError:
            pass  # it is lost, which everybody sees
        if self.agent.lost is not None:
            self._lose()

    def _take(self) -> None:
        for ticket, request in list(self._requests.items()):
            answer = self.agent.take(ticket)
            if answer is not None:
                del self._requests[ticket]
                request.error = answer.get("error")
                request.done = request.error is None

    def _attach(self) -> None:
        if self._attaching is not None and self._attaching.done:
            name, memory, _ = self._to_attach.popleft()
            self.memories[name], self._attaching = memory, None
        elif self._attaching is not None and self._attaching.error is not None:
            self.agent.drop(f"could not attach: {self._attaching.error}")
        if self._attaching is None and self._to_attach:
            name, memory, contract = self._to_attach[0]
            self._attaching = self.ask("attach", [memory.fd], name=name, contract=contract)

    def stalled(self, limit_s: float) -> bool:
        """Whether something was asked and nothing has moved for `limit_s`; asked in each turn."""
        mark = [(m.moved_bytes, m.center_word, m.stage) for m in self.memories.values()]
        if self.idle or mark != self._mark:
            self._mark, self._moved_at = mark, time.monotonic()
        return time.monotonic() - self._moved_at > limit_s

    def drop(self, why: str) -> None:
        """End the agent; what it was asked is lost."""
        self.agent.drop(why)
        self._lose()

    def _lose(self) -> None:
        for request in self._requests.values():
            request.lost = True
        self._requests.clear()
