"""Scheduler and servers on this host, as the station sees them: begun, watched, ended.

A zygote forks them. Each holds one end of a socket whose other end is here, so
an end is seen at once; how it came is the zygote's word. The station adopts
orphans: where the zygote was killed its roles live on, and the kernel then
tells their ends to the station.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

from . import wire
from .ends import ZygoteEnd, ending
from .lifeline import Lifeline

__all__ = ["Ports", "Roles"]

Say = Callable[[Dict[str, Any]], None]

_PR_SET_CHILD_SUBREAPER = 36
_WORD_S = 1.0  # for the zygote to say how a role ended whose end was seen
_STUCK_S = 20.0  # a zygote that has not forked for so long is not worth keeping
_END_S = 2.0  # for killed roles to be gone when the station ends


class Ports:
    """Free ports, none of them twice: an agent of an old generation reconnects to its server's."""

    def __init__(self) -> None:
        self._used: Set[int] = set()

    def take(self, host: str, port: int = 0) -> int:
        """Return `port`, or where that is 0 a port that is free on `host`.

        Raises
        ------
        OSError
            Where the host is not this one, or the port is in use or was used before.
        """
        for _ in range(100):
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                found = int(probe.getsockname()[1])
            if found not in self._used:
                self._used.add(found)
                return found
        raise OSError(f"port {port or found} was used by an earlier generation")


class _Role:
    """One scheduler or server.

    `pid` is 0 until the zygote has said it; `orphan` says how that zygote ended, once it has.
    """

    def __init__(self, fields: Dict[str, Any], sock: socket.socket) -> None:
        self.fields, self.sock, self.asked_at = fields, sock, time.monotonic()
        self.pid, self.status = 0, None  # type: int, Optional[int]
        self.address: Optional[str] = None
        self.over_at: Optional[float] = None  # when the end of its socket was seen
        self.orphan, self.unwanted = "", False

    def look(self) -> bool:
        """Find out whether it has ended; return whether that is seen for the first time."""
        is_new = self.over_at is None and _is_over(self.sock)
        if is_new:
            self.over_at = time.monotonic()
        if self.orphan and self.pid and self.status is None:
            with contextlib.suppress(ChildProcessError):  # its zygote took its status along
                self.status = _status_of_child(self.pid)
        return is_new

    def how(self) -> Optional[str]:
        """Say how it ended; None where it has not, or where that may still be heard."""
        if self.status is not None:
            return ending(self.status)
        if self.orphan and not self.pid:  # if it was forked after all it ends with its socket
            return f"was not started: its zygote {self.orphan}"
        if self.over_at is None:
            return None
        return "is gone" if time.monotonic() > self.over_at + _WORD_S else None

    def message(self, say: str, **more: Any) -> Dict[str, Any]:
        return {"say": say, **self.fields, "pid": self.pid, **more}


class Roles:
    """The roles of this host and the zygote that forks them.

    Parameters
    ----------
    say : callable
        Gets the messages 'serving' and 'ended' for the launcher.
    logs : str
        Folder of the roles' logs.
    secret : str
        Of the job, in hex.
    """

    def __init__(self, say: Say, logs: str, secret: str) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._say, self._logs, self._secret = say, logs, secret
        self._lifeline, self._ports, self._tags = Lifeline(), Ports(), itertools.count(1)
        self._roles: Dict[int, _Role] = {}  # by tag
        self._over = 0  # the newest generation that was ended
        self._zygote: Optional[ZygoteEnd] = ZygoteEnd(self._lifeline)

    def scheduler(self, generation: int, host: str, port: int, terms: Mapping[str, int]) -> None:
        """Begin a scheduler on `host`; `terms` has num_clients and num_servers."""
        fields = {"generation": generation, "role": "scheduler", "index": 0}
        try:
            address = f"{host}:{self._ports.take(host, port)}"
            self._begin(fields, address, terms, "scheduler").address = address
        except (OSError, OverflowError, UnicodeError) as error:
            self._fail(fields, f"host {host}, port {port}: {error}")

    def server(self, generation: int, index: int, address: str, terms: Mapping[str, int]) -> None:
        """Begin server `index`, of the scheduler at `address`."""
        fields = {"generation": generation, "role": "server", "index": index}
        try:
            self._begin(fields, address, terms, f"server{index}")
        except OSError as error:
            self._fail(fields, str(error))

    def _fail(self, fields: Dict[str, Any], why: str) -> None:
        self._say({"say": "ended", **fields, "pid": 0, "how": f"was not started: {why}"})

    def has(self, generation: int, role: str, index: int) -> bool:
        """Return whether there is this role, or no more use for it."""
        wanted = {"generation": generation, "role": role, "index": index}
        known = any(role.fields == wanted for role in self._roles.values())
        return generation <= self._over or known

    def _begin(
        self, fields: Dict[str, Any], address: str, terms: Mapping[str, int], log: str
    ) -> _Role:
        if self._zygote is None:
            self._zygote = ZygoteEnd(self._lifeline)
        ours, theirs = wire.pair()
        ours.setblocking(False)
        tag = next(self._tags)
        role = self._roles[tag] = _Role(fields, ours)
        more = {
            "scheduler": address,
            "generation": fields["generation"],
            "secret": self._secret,
            "log": os.path.join(self._logs, f"{log}.log"),
        }
        with theirs:
            self._zygote.fork(fields["role"], tag, {**terms, **more}, theirs.fileno())
        return role

    def end(self, generation: int) -> None:
        """Kill all roles of this and older generations; their ends are not said."""
        self._over = max(self._over, generation)
        for tag, role in self._roles.items():
            if role.fields["generation"] <= generation:
                role.unwanted = True
                self._kill(tag, role)

    def _kill(self, tag: int, role: _Role) -> None:
        if role.orphan:
            _kill_child(role.pid)
        elif self._zygote is not None:
            self._zygote.kill(tag)
            if not role.pid and time.monotonic() > role.asked_at + _STUCK_S:
                self._zygote.process.kill()

    def descriptors(self) -> List[int]:
        """Return what to wait on until `look` has something to do."""
        fds = [role.sock.fileno() for role in self._roles.values() if role.over_at is None]
        return fds if self._zygote is None else [*fds, self._zygote.fileno()]

    def timeout_s(self) -> Optional[float]:
        """Return after how long `look` has something to do in any case."""
        seen = [role.over_at for role in self._roles.values() if role.over_at is not None]
        return max(0.0, min(seen) + _WORD_S - time.monotonic()) + 0.01 if seen else None

    def look(self) -> None:
        """Find out what has become of zygote and roles, and say it."""
        self._hear_zygote()
        for tag, role in list(self._roles.items()):
            if role.look():
                self._kill(tag, role)  # the zygote then looks at once how it ended
            how = role.how()
            if how is not None:
                del self._roles[tag]
                role.sock.close()
                if not role.unwanted:
                    self._say(role.message("ended", how=how))

    def _hear_zygote(self) -> None:
        if self._zygote is None:
            return
        said, is_gone = self._zygote.news()
        for message in said:
            role = self._roles.get(message["tag"])
            if role is not None and "status" in message:
                role.status = message["status"]
            elif role is not None:
                role.pid = message["pid"]
                self._say_serving(role)
        if is_gone:
            self._lose_zygote(self._zygote)

    def _say_serving(self, role: _Role) -> None:
        if not role.unwanted:
            address = {} if role.address is None else {"address": role.address}
            self._say(role.message("serving", **address))

    def _lose_zygote(self, zygote: ZygoteEnd) -> None:
        """Take over its children; the next role gets another zygote."""
        zygote.close()  # waits: from then on they are this process's own
        self._zygote = None
        for role in self._roles.values():
            role.orphan = role.orphan or f"ended with {zygote.process.returncode}"
            if role.unwanted:
                _kill_child(role.pid)

    def close(self) -> None:
        """Kill and reap all; a few seconds at most."""
        if self._zygote is not None:
            self._zygote.close()
        self._lifeline.close()
        limit = time.monotonic() + _END_S
        pids = {role.pid for role in self._roles.values()}
        while sum(map(_kill_child, pids)) and time.monotonic() < limit:
            time.sleep(0.005)
        for role in self._roles.values():
            role.sock.close()


def _is_over(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _status_of_child(pid: int) -> Optional[int]:
    """Return the wait status of a child that has ended, and forget it; None while it lives."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return status if ended else None


def _kill_child(pid: int) -> bool:
    """Kill `pid` where it is a living child of this process (0 is none); return whether it was."""
    try:
        if not pid or _status_of_child(pid) is not None:
            return False
    except ChildProcessError:
        return False
    os.kill(pid, signal.SIGKILL)
    return True
