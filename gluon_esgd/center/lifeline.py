"""A file lock by which children notice that their leader is gone.

The end of a socket is not enough: a process that the leader forked (a
``DataLoader`` worker) inherits the leader's end and keeps it open. A POSIX
record lock belongs to the process that took it, is not inherited by fork, and
the kernel drops it with the process, however it ends. Unlike
``PR_SET_PDEATHSIG`` it is not tied to the thread that started the child.
"""

from __future__ import annotations

import fcntl
import os
import threading

__all__ = ["Lifeline", "is_cut", "watch"]


class Lifeline:
    """A lock that this process holds until `close` or its end.

    The process must not close a duplicate of `fd` meanwhile: that would drop the lock.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("gluon-esgd-lifeline")
        fcntl.lockf(self.fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Drop the lock: whoever watches it ends."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def is_cut(fd: int) -> bool:
    """Return whether the holder of the lifeline is gone."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def watch(fd: int) -> None:
    """Start a thread that ends this process as soon as the lifeline is cut."""

    def wait() -> None:
        fcntl.lockf(fd, fcntl.LOCK_SH)
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
