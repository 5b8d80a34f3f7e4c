"""The socket by which ``gluon-esgd status`` and its like talk to a running launcher.

One JSON object on a line in, one out, then the connection ends. The launcher never waits
here: what is incomplete, too long or too slow is given up.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

from ..errors import LaunchError
from .state import ended

__all__ = ["Control", "ask"]

_LONGEST = 1 << 16  # bytes of a question
_LIMIT_S = 10.0  # of a connection
_MOST = 16  # connections at a time

Message = Dict[str, Any]


def _path(job_dir: str) -> Path:
    return Path(job_dir, "state", "control")


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of `path` that fits into the address of a socket, however long it is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class _Connection:
    """One question and its answer."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket, self.since = sock, time.monotonic()
        self.question, self.answer = b"", b""


class Control:
    """The launcher's side.

    Parameters
    ----------
    job_dir : str
        Folder of the job.
    selector : selectors.BaseSelector
        Where descriptors are registered, each with what to call.
    answer : callable
        Gets a question and returns the answer; ValueError is answered with its text.
    """

    def __init__(
        self,
        job_dir: str,
        selector: selectors.BaseSelector,
        answer: Callable[[Message], Message],
    ) -> None:
        self._selector, self._answer = selector, answer
        self._connections: List[_Connection] = []
        self._path = _path(job_dir)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with _short(self._path) as name:
            self._socket.bind(name)
            os.chmod(name, 0o600)
        self._socket.listen(_MOST)
        self._socket.setblocking(False)
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def look(self) -> None:
        """Give up who takes too long."""
        now = time.monotonic()
        for each in [c for c in self._connections if now - c.since > _LIMIT_S]:
            self._end(each)

    def close(self) -> None:
        """End all connections, and take the socket away."""
        for each in list(self._connections):
            self._end(each)
        self._selector.unregister(self._socket)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return
        if len(self._connections) >= _MOST or not _is_own(sock):
            return sock.close()
        sock.setblocking(False)
        each = _Connection(sock)
        self._connections.append(each)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, each))

    def _read(self, each: _Connection) -> None:
        try:
            chunk = each.socket.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        each.question += chunk
        if b"\n" in each.question or len(each.question) > _LONGEST:
            each.answer = json.dumps(self._reply(each.question)).encode() + b"\n"
            self._selector.modify(each.socket, selectors.EVENT_WRITE, partial(self._write, each))
        elif not chunk:
            self._end(each)

    def _reply(self, question: bytes) -> Message:
        line, newline, _ = question.partition(b"\n")
        try:
            message = json.loads(line) if newline else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            return {"error": f"a question is one JSON object on a line of at most {_LONGEST} bytes"}
        try:
            return self._answer(message)
        except (ValueError, LaunchError) as error:
            return {"error": str(error)}

    def _write(self, each: _Connection) -> None:
        try:
            each.answer = each.answer[each.socket.send(each.answer) :]
        except BlockingIOError:
            return
        except OSError:
            each.answer = b""
        if not each.answer:
            self._end(each)

    def _end(self, each: _Connection) -> None:
        self._selector.unregister(each.socket)
        each.socket.close()
        self._connections.remove(each)


def _is_own(sock: socket.socket) -> bool:
    """Whether who connects is this user."""
    format_ = "3i"
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(format_))
    return bool(struct.unpack(format_, told)[1] == os.getuid())


def ask(job_dir: str, question: Message) -> Message:
    """Return what the launcher of a job answers.

    Raises
    ------
    LaunchError
        No job runs in the folder, its launcher does not answer, or it says why not.
    """
    try:
        with _short(_path(job_dir)) as name, socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_LIMIT_S)
            sock.connect(name)
            sock.sendall(json.dumps(question).encode() + b"\n")
            with sock.makefile("rb") as answers:
                answer = json.loads(answers.readline())
    except socket.timeout:
        raise LaunchError(f"the launcher of {job_dir} does not answer") from None
    except (OSError, ValueError):
        raise LaunchError(f"no job is running in {job_dir}{ended(job_dir)}") from None
    if "error" in answer:
        raise LaunchError(answer["error"])
    return dict(answer)
