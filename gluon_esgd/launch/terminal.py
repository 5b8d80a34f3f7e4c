"""The launcher's own standard output, written without ever waiting for who reads it."""

from __future__ import annotations

import os
import select
import time

__all__ = ["Terminal"]

_PIECE = 4096  # at most PIPE_BUF: a pipe that polls writable takes it at once
_KEEP = 16 << 20  # beyond this much unread text the rest is only in the logs


class Terminal:
    """Collects bytes and writes as much as is taken; Ctrl-C works while nobody reads.

    Parameters
    ----------
    fd : int, default 1
        Where to write.
    """

    def __init__(self, fd: int = 1) -> None:
        self._fd = fd
        self._pending = bytearray()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def pending(self) -> bool:
        """Whether there is text that was not taken yet."""
        return bool(self._pending)

    def write(self, text: bytes) -> None:
        """Add text, and write what is taken now."""
        if len(self._pending) < _KEEP:
            self._pending += text
        self.flush(0)

    def flush(self, timeout_s: float) -> None:
        """Write for as long as it is taken, waiting at most `timeout_s` in all."""
        limit = time.monotonic() + timeout_s
        while self._pending:
            if not self._poll.poll(1000 * max(0.0, limit - time.monotonic())):
                return
            self._write_piece()

    def _write_piece(self) -> None:
        try:
            taken = os.write(self._fd, self._pending[:_PIECE])
        except OSError:
            taken = len(self._pending)  # nobody reads any more; the logs have it all
        del self._pending[:taken]
