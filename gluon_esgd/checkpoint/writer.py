"""Writing on a thread beside the training."""

from __future__ import annotations

import threading
from typing import Callable, Optional

__all__ = ["Writer"]


class Writer:
    """At most one write at a time, here or on a thread.

    The thread gets arrays in host memory and touches nothing of MXNet: a process that forks in the
    meantime (``DataLoader`` does) leaves it behind, and it writes on. A script that ends waits for
    it.

    Parameters
    ----------
    background : bool
    """

    def __init__(self, background: bool) -> None:
        self._background = background
        self._thread: Optional[threading.Thread] = None
        self._failure: Optional[Exception] = None

    def start(self, write: Callable[[], None]) -> None:
        """Call `write`, now or on a thread, after the last one has ended: see `finish`."""
        self.finish()
        if not self._background:
            write()
            return
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="checkpoint writer", daemon=False
        )
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._failure = error

    def finish(self) -> None:
        """Wait for the thread, and raise what its write raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
