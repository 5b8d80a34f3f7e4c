"""The station's Unix socket and the connections of leaders that come through it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from typing import List, Optional

from .dispatch import Message
from .lines import Lines, encode, short_path

__all__ = ["LEADERS", "Connection", "Door"]

LEADERS = 256  # connections at a time

_CHUNK = 1 << 16
_UNREAD = 4 << 20  # bytes that wait for a leader; one that does not read is dropped


class Door:
    """A listening socket that no other user can reach; replaces one that was left at `path`."""

    def __init__(self, path: str) -> None:
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, 0o700, exist_ok=True)
        self._path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        mask = os.umask(0o177)
        try:
            with short_path(path) as short:
                if os.path.lexists(short):
                    os.unlink(short)
                self._sock.bind(short)
        finally:
            os.umask(mask)
        self._inode = os.lstat(path).st_ino
        self._sock.listen(LEADERS)

    def fileno(self) -> int:
        """Return what to wait on for `accept`."""
        return self._sock.fileno()

    def accept(self) -> Connection:
        """Return the next connection.

        Raises
        ------
        OSError
            Where there is none.
        PermissionError
            Where it was another user's, which root may be.
        """
        sock = self._sock.accept()[0]
        size = struct.calcsize("3i")  # pid, uid, gid
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            sock.close()
            raise PermissionError(f"it is of user {user}, the job of user {os.getuid()}")
        return Connection(sock)

    def close(self) -> None:
        """Stop listening and remove the socket, unless another station has put its own there."""
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(self._path).st_ino == self._inode:
                os.unlink(self._path)


class Connection:
    """A leader's connection. Nothing here blocks.

    Attributes
    ----------
    client, pid : int or None
        As the leader said in its hello.
    lost : str or None
        Why the connection is over.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.client: Optional[int] = None
        self.pid: Optional[int] = None
        self.lost: Optional[str] = None
        self._sock, self._lines, self._waiting = sock, Lines(), bytearray()
        sock.setblocking(False)

    def fileno(self) -> int:
        """Return what to wait on."""
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """What to wait for besides input, for ``select.poll``."""
        return select.POLLOUT if self._waiting else 0

    def tell(self, message: Message) -> None:
        """Send `message`, what the leader does not take now later."""
        self._waiting += encode(message)
        self.flush()
        if len(self._waiting) > _UNREAD:
            self._lose("it does not read what it is told")

    def drop(self) -> None:
        """End the connection, because its client has made another."""
        self._lose("its client has connected again")

    def flush(self) -> None:
        """Send what waits, as far as the leader takes it."""
        try:
            while self._waiting and self.lost is None:
                del self._waiting[: self._sock.send(self._waiting)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(str(error))

    def receive(self) -> List[bytes]:
        """Return the lines that have come; none once the connection is lost."""
        if self.lost is not None:
            return []
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError as error:
            self._lose(str(error))
            return []
        lines = self._lines.feed(data)
        if self._lines.too_long:
            self._lose("it sent a line that is too long")
        elif not data:
            self._lose("it has left")
        return lines

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
