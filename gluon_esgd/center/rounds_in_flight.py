"""Rounds of rule ``sgd`` in the agent: pushes, pulls and answers go on beside each other.

Links carry both ways at once. So while the sum of one chunk comes back the next one is pushed, over
the ends of rounds too, and several rounds are under way. A request to pull waits on the wire behind
what was pushed before it: all at once would mean that nothing is pulled before everything is
pushed. So little is under way to the servers at any time, and a chunk is asked for as soon as they
have answered its push, before further ones are pushed.
"""

from __future__ import annotations

import functools
import os
import threading
import traceback
from queue import SimpleQueue
from typing import Any, Callable, List, NamedTuple, Optional

from .route import Route, X, acknowledged

__all__ = ["RoundsInFlight"]

# To one server: what arrives there, and what follows while its answer is on the way.
_FLOATS_UNDER_WAY = 3 << 18


class _Chunk(NamedTuple):
    """One on its way; `answer` is called when the last one of a round is back."""

    route: Route
    number: int
    sent: List[Any]
    answer: Optional[Callable[[], None]]

    @property
    def size(self) -> int:
        return int(self.sent[0].size)


class RoundsInFlight:
    """The rounds that were begun and not answered; answered in the order in which they began.

    The caller's thread pushes, one thread waits for the servers' acknowledgements and asks for the
    sums, another waits for these and answers. What fails in these two ends the process, as most
    faults do in ps-lite itself: the leader sees it, and the log has the cause.

    Parameters
    ----------
    num_servers : int
    """

    def __init__(self, num_servers: int) -> None:
        self._most = _FLOATS_UNDER_WAY * num_servers
        self._changed = threading.Condition()
        self._under_way = self._open = 0  # floats that are pushed; chunks
        self._store = threading.Lock()  # two threads use it
        self._pushed: SimpleQueue[_Chunk] = SimpleQueue()
        self._asked_for: SimpleQueue[_Chunk] = SimpleQueue()
        for name, work in (("pulls", self._pull), ("answers", self._answer)):
            threading.Thread(target=_for_ever, args=(work,), name=name, daemon=True).start()

    def start(self, route: Route, first: int, last: int, answer: Callable[[], None]) -> None:
        """Push chunks ``[first, last)`` of x; `answer` is called when x holds their sums.

        Waits until the last of them is under way.
        """
        for number in range(first, last):
            size = route.size(number)
            with self._changed:
                self._changed.wait_for(functools.partial(self._has_room, size))
            with self._store:
                sent = route.push(X, number, number + 1)
            with self._changed:
                self._under_way, self._open = self._under_way + size, self._open + 1
            self._pushed.put(_Chunk(route, number, sent, answer if number == last - 1 else None))

    def _has_room(self, size: int) -> bool:
        return not self._under_way or self._under_way + size <= self._most

    def wait(self) -> None:
        """Return when all rounds are answered."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open)

    def _pull(self) -> None:
        chunk = self._pushed.get()
        for array in chunk.sent:
            acknowledged(array)
        with self._store:  # ahead of the push that waits for this chunk's place
            chunk.route.ask(X, chunk.number, chunk.number + 1)
        with self._changed:
            self._under_way -= chunk.size
            self._changed.notify_all()
        self._asked_for.put(chunk)

    def _answer(self) -> None:
        chunk = self._asked_for.get()
        chunk.route.settle(chunk.sent)  # which counts: one thread only may do that
        chunk.route.arrived(X, chunk.number, chunk.number + 1)
        if chunk.answer is not None:
            chunk.answer()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()


def _for_ever(work: Callable[[], None]) -> None:
    try:
        while True:
            work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
