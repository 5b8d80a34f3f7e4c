"""Reports of waits that cannot look at the clock themselves: a leader's, for agent and servers."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, Optional

__all__ = ["reported"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.5  # how often the thread looks, of which a process has one


class _Wait:
    """One that is going on."""

    def __init__(self, report: Callable[[], str], warning_s: float) -> None:
        self._report, self._start, self._warn_s = report, time.monotonic(), warning_s

    def look(self) -> None:
        """Log the wait if it has lasted so long."""
        waited = time.monotonic() - self._start
        if waited > self._warn_s:
            self._warn_s = 2 * waited
            _log.warning("%s; waited %.0f s so far", self._report(), waited)


_waits: Dict[int, _Wait] = {}
_numbers = itertools.count()
_thread: Optional[threading.Thread] = None


@contextmanager
def reported(report: Callable[[], str], warning_s: float) -> Iterator[None]:
    """Log what `report` says when the block lasts `warning_s`, and whenever that has doubled.

    Parameters
    ----------
    report : callable
        Called in a thread of its own, only when there is something to say.
    warning_s : float
        Seconds.
    """
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_look, name="gluon_esgd watch", daemon=True)
        _thread.start()
    number = next(_numbers)
    _waits[number] = _Wait(report, warning_s)
    try:
        yield
    finally:
        del _waits[number]


def _look() -> None:
    while True:
        time.sleep(_LOOK_S)
        for wait in list(_waits.values()):
            wait.look()
