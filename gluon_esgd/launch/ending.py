"""How a job is ended: ask, insist, kill, and look for what is left. Bounded in every case."""

from __future__ import annotations

import signal
import time
from typing import Callable, List, Sequence, Tuple

from . import proc
from .child import Child
from .tell import tell_ranks

__all__ = ["Ending"]

INTERRUPT_S = 3.0  # what ranks have after SIGINT, to save and to report
TERMINATE_S = 3.0  # what everything has after SIGTERM


class Ending:
    """The steps by which the children of a job, or of one client, end.

    Ranks get SIGINT from here, not through ``mpiexec``, which would kill them
    at once; ``mpiexec`` follows when they are gone. With a grace they get SIGTERM
    first and have that long to end by themselves. Stations never do so: they get
    SIGTERM as soon as no client is left.

    Parameters
    ----------
    children : list of Child
        All that was started; may still grow.
    markers : str
        NAME=VALUE, all of which mark the processes in their environment.
    """

    def __init__(self, children: List[Child], *markers: str) -> None:
        self._children = children
        self._markers = markers
        self._steps: List[Tuple[float, Callable[[], None]]] = []
        self._began = 0.0
        self._center_asked = False
        self.begun = False

    def begin(self, grace_s: float = 0.0) -> None:
        """Start to end everything; a second call changes nothing."""
        if self.begun:
            return
        self.begun, self._began = True, time.monotonic()
        self._steps = [
            (grace_s, self._interrupt),
            (grace_s + INTERRUPT_S, self._terminate),
            (grace_s + INTERRUPT_S + TERMINATE_S, self._kill),
        ]
        if grace_s:
            self._steps.insert(0, (0.0, self._ask))
        self.step()

    def hurry(self) -> None:
        """Kill everything now."""
        self._steps = []
        self._kill()

    def step(self) -> None:
        """Do what is due."""
        if not self.begun:
            return
        while self._steps and time.monotonic() - self._began >= self._steps[0][0]:
            self._steps.pop(0)[1]()
        if not self._center_asked and not self._alive(clients=True):
            self._center_asked = True
            self._end(self._alive(clients=False), signal.SIGTERM)
            now = time.monotonic() - self._began
            self._steps = [(now + TERMINATE_S, self._kill)]

    def done(self) -> bool:
        """Whether everything that was started has ended."""
        return self.begun and not self._alive(clients=True) and not self._alive(clients=False)

    def _alive(self, clients: bool) -> List[Child]:
        kind = [c for c in self._children if (c.process.client is not None) == clients]
        return [child for child in kind if child.poll() is None]

    def _ask(self) -> None:
        self._tell_ranks(signal.SIGTERM)

    def _interrupt(self) -> None:
        self._tell_ranks(signal.SIGINT)

    def _tell_ranks(self, number: int) -> None:
        clients = self._alive(clients=True)
        for child in clients:
            child.pass_on(number)
        away = {(child.process.client, rank) for child in clients for rank in child.process.away}
        tell_ranks(number, lambda client, rank: (client, rank) not in away, *self._markers)

    def _terminate(self) -> None:
        self._end(self._children, signal.SIGTERM)

    def _kill(self) -> None:
        self._end(self._children, signal.SIGKILL)
        proc.kill_job(*self._markers, limit_s=0.1)

    def _end(self, children: Sequence[Child], number: int) -> None:
        for child in children:
            child.end(number)

    def sweep(self) -> None:
        """Kill what outlived its parents, and wait, bounded, until it is gone."""
        self._end(self._children, signal.SIGKILL)
        proc.kill_job(*self._markers)
        for child in self._children:
            child.poll()
