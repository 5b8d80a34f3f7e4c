"""Signals as something to select on, so that one thread waits for everything."""

from __future__ import annotations

import os
import signal
from typing import Any, Dict, Sequence

__all__ = ["SignalPipe"]


def _nothing(number: int, frame: Any) -> None:
    """Only the wake-up descriptor counts; a handler must exist for it to be written."""


class SignalPipe:
    """Turns signals into bytes on a pipe until it is closed; main thread only.

    Parameters
    ----------
    numbers : sequence of int
        Signals to take over.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._before: Dict[int, Any] = {n: signal.signal(n, _nothing) for n in numbers}
        self._fd_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._reading

    def take(self) -> Sequence[int]:
        """Return the numbers of the signals that came since the last call."""
        try:
            return tuple(os.read(self._reading, 4096))
        except BlockingIOError:
            return ()

    def close(self) -> None:
        """Put the former handlers back."""
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reading)
        os.close(self._writing)
