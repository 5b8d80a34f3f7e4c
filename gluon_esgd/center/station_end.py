"""The leader's end of the station's socket: lines of JSON, and finding the station again.

One thread calls `pump`, which never waits; any thread may call `say`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import socket
import threading
import time
from typing import Any, Callable, Deque, Dict, List, Optional

from .lines import LARGEST, Lines, encode, parse, short_path

__all__ = ["StationEnd"]

_log = logging.getLogger(__name__)

_AGAIN_S = 0.2  # between two attempts to find the station
_READ = 1 << 16


class StationEnd:
    """A connection to the station at `path` that is made again whenever it ends.

    Parameters
    ----------
    path : str
        Of the Unix socket; it may be longer than an address of a socket.
    greet : callable
        Returns the messages with which each connection begins.
    """

    def __init__(self, path: str, greet: Callable[[], List[Dict[str, Any]]]) -> None:
        self._path, self._greet = path, greet
        self._sock: Optional[socket.socket] = None
        self._in = Lines()
        self._out: Deque[bytes] = collections.deque()
        self._next_attempt = 0.0
        self.missing_since = time.monotonic()  # while there is no connection
        self._waking = threading.Lock()  # the number of a closed pipe may be another file's
        self._wake_in, self._wake_out = os.pipe()
        for fd in (self._wake_in, self._wake_out):
            os.set_blocking(fd, False)

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._sock is not None

    @property
    def missing_s(self) -> float:
        """Seconds since the connection ended, or since the start; 0 while there is one."""
        return 0.0 if self.connected else time.monotonic() - self.missing_since

    @property
    def is_empty(self) -> bool:
        """Whether all that was said is on its way."""
        return not self._out

    def say(self, message: Dict[str, Any]) -> None:
        """Put `message` among those to be sent, and wake the thread that sends them."""
        self._out.append(encode(message))
        self.wake()

    def wake(self) -> None:
        """Let whoever polls `readers` go on."""
        with self._waking, contextlib.suppress(OSError):  # full: it is awake as it is
            if self._wake_out >= 0:
                os.write(self._wake_out, b"!")

    def readers(self) -> List[int]:
        """Return the descriptors to poll for reading."""
        return [self._wake_in] + ([self._sock.fileno()] if self._sock is not None else [])

    def writers(self) -> List[int]:
        """Return the descriptors to poll for writing."""
        return [self._sock.fileno()] if self._sock is not None and self._out else []

    def pump(self) -> List[Dict[str, Any]]:
        """Connect where that is due, send what can be sent; return what has arrived."""
        with contextlib.suppress(OSError):
            os.read(self._wake_in, _READ)
        if self._sock is None and time.monotonic() >= self._next_attempt:
            self._connect()
        if self._sock is None:
            return []
        messages: List[Dict[str, Any]] = []
        try:
            self._send(self._sock)
            self._receive(self._sock, messages)
        except OSError:
            self._end()
        return messages

    def _connect(self) -> None:
        self._next_attempt = time.monotonic() + _AGAIN_S
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            with short_path(self._path) as path:
                sock.connect(path)
        except OSError:
            sock.close()
            return
        self._sock, self._in = sock, Lines()
        # What was said to a station that is gone is in the greeting, if it still counts.
        self._out.clear()
        self._out.extend(encode(message) for message in self._greet())

    def _send(self, sock: socket.socket) -> None:
        while self._out:
            line = self._out[0]
            try:
                sent = sock.send(line)
            except BlockingIOError:
                return
            if sent < len(line):
                self._out[0] = line[sent:]
                return
            self._out.popleft()

    def _receive(self, sock: socket.socket, messages: List[Dict[str, Any]]) -> None:
        while True:
            try:
                data = sock.recv(_READ)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError
            too_long = self._in.too_long
            for line in self._in.feed(data):
                try:
                    messages.append(parse(line))
                except ValueError as error:
                    _log.error("a line from the station was dropped: %s", error)
            if self._in.too_long > too_long:
                _log.error("a line from the station was dropped: over %d bytes", LARGEST)

    def _end(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock, self.missing_since = None, time.monotonic()
            self._next_attempt = time.monotonic() + _AGAIN_S

    def close(self) -> None:
        """Close the connection."""
        self._end()
        with self._waking:
            fds, self._wake_in, self._wake_out = (self._wake_in, self._wake_out), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def forget(self) -> None:
        """Close the copy of the socket that a forked child has: the station must see our end."""
        if self._sock is not None:
            self._sock.close()
