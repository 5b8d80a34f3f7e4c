"""Messages between leader, zygote and agent: JSON datagrams with descriptors beside them.

The sockets are Unix SEQPACKET pairs: whole messages, in order, and an end of
file when the other side is gone. Nothing here is unpickled.
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any, Dict, List, Sequence, Tuple

__all__ = ["READY", "pair", "receive", "send"]

READY = 0  # the ticket under which an agent says, unasked, that its store is up

_LARGEST = 1 << 16
_FDS = 8


def pair() -> Tuple[socket.socket, socket.socket]:
    """Return both ends of a new connection; neither passes on by exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: Dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; the receiver gets duplicates of `fds` (SCM_RIGHTS)."""
    data = json.dumps(message).encode()
    if len(data) > _LARGEST:
        raise ValueError(f"a message of {len(data)} bytes is over the limit of {_LARGEST}")
    rights = array.array("i", fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
    sock.sendmsg([data], ancillary)


def receive(sock: socket.socket, flags: int = 0) -> Tuple[Dict[str, Any], List[int]]:
    """Return the next message and its descriptors; EOFError when the other side is gone.

    BlockingIOError where `flags` or the socket say not to wait and there is none; ValueError for
    one that is cut off or no JSON object, whose descriptors are then closed.
    """
    room = socket.CMSG_SPACE(_FDS * array.array("i").itemsize)
    try:
        data, ancillary, told, _ = sock.recvmsg(_LARGEST, room, flags | socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        data, ancillary, told = b"", [], 0
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    try:
        return _message(data, told), list(fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _message(data: bytes, flags: int) -> Dict[str, Any]:
    if not data:
        raise EOFError
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        most = f"{_LARGEST} bytes or {_FDS} descriptors"
        raise ValueError(f"a message of more than {most} was cut off")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a message that is no JSON: {error!s:.80}") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message that is no JSON object: {message!r:.80}")
    return message
