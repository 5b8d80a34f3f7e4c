"""The leader's ends of its two processes: zygote and agent. No wait is without a limit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ..errors import CenterError
from . import pslite, wire
from .lifeline import Lifeline
from .wire import READY

__all__ = ["AgentEnd", "ZygoteEnd", "ending"]

_END_S = 1.0  # for a process to end by itself, before SIGKILL
_POLL_S = 0.005  # another thread may have read the answer that this one waits for


def _environment() -> Dict[str, str]:
    """Return the zygote's: no role, or importing MXNet would be the end; one thread, no GPU."""
    env = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    for name in pslite.variables(env):
        del env[name]
    return env


def ending(status: int) -> str:
    """Say how a process ended, from its wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = next((s.name for s in signal.Signals if s == number), f"signal {number}")
        return f"was killed by {name}"
    return f"ended with code {os.WEXITSTATUS(status)}"


class ZygoteEnd:
    """Starts a zygote and asks it for children.

    It is a plain ``Popen`` with ``pass_fds``: no Python code runs between fork and exec, which
    MXNet's fork handler could block.

    Parameters
    ----------
    lifeline : Lifeline
        Held by this process; the zygote and its children end with it.
    log : file or None
        Where zygote and children write; None: this process's standard error.
    """

    def __init__(self, lifeline: Lifeline, log: Optional[IO[bytes]] = None) -> None:
        self._lifeline = lifeline
        self._sock, theirs = wire.pair()
        self._lock = threading.Lock()
        self._endings: Dict[int, int] = {}
        out: Union[int, IO[bytes]] = 2 if log is None else log
        fds = (theirs.fileno(), lifeline.fd)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gluon_esgd.center.zygote", *map(str, fds)],
                pass_fds=fds,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._sock.setblocking(False)

    def fork(self, role: str, tag: int, terms: Mapping[str, Any], fd: int) -> None:
        """Ask for a child; if the zygote is gone, the other end of `fd` ends at once."""
        with contextlib.suppress(OSError):
            wire.send(self._sock, {"fork": role, "tag": tag, "terms": dict(terms)}, [fd])

    def kill(self, tag: int) -> None:
        """Ask for the end of a child that may not run even far enough to see its socket end."""
        with contextlib.suppress(OSError):
            wire.send(self._sock, {"kill": tag})

    def fate(self, tag: int, timeout_s: float) -> str:
        """Say how the child `tag` ended; waits `timeout_s` for the zygote's word."""
        end = time.monotonic() + timeout_s
        while True:
            with self._lock:
                gone = self._drain()
                if tag in self._endings:
                    return ending(self._endings[tag])
            if gone and self.process.poll() is not None:
                return f"is gone with its zygote, which ended with {self.process.returncode}"
            if time.monotonic() >= end:
                return "is gone"
            time.sleep(_POLL_S)

    def hear(self) -> None:
        """Take in what it has said of its children: unread, that would block it some day."""
        with self._lock:
            self._drain()

    def _drain(self) -> bool:
        said, is_gone = self.news()
        for message in said:
            if "status" in message:
                self._endings[message["tag"]] = message["status"]
        return is_gone

    def fileno(self) -> int:
        """Return what to wait on for `news`."""
        return self._sock.fileno()

    def news(self) -> Tuple[List[Dict[str, Any]], bool]:
        """Return what the zygote has said since it was last asked, and whether it is gone."""
        said = []
        try:
            while True:
                said.append(wire.receive(self._sock)[0])
        except BlockingIOError:
            return said, False
        except (EOFError, OSError, ValueError):  # ValueError: it says what no zygote says
            return said, True

    @property
    def alive(self) -> bool:
        """Whether it can still be asked for children."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the zygote and all its children; at most a second or so."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # also where a forked child holds a duplicate
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._sock.close()


class AgentEnd:
    """One agent, that is one generation, as its leader sees it. Thread-safe.

    Parameters
    ----------
    zygote : ZygoteEnd
        Forks the agent.
    terms : mapping
        Arguments of the agent's `Store`.
    tag : int
        Number of the generation.
    log_path : str or None
        Where the agent writes; for messages.
    fate_s : float, optional
        How long to wait, when it is found lost, for the zygote's word on how it ended.

    Attributes
    ----------
    lost : str or None
        Why it is not to be asked any more.
    """

    def __init__(
        self,
        zygote: ZygoteEnd,
        terms: Mapping[str, Any],
        tag: int,
        log_path: Optional[str],
        fate_s: float = _END_S,
    ) -> None:
        self._fate_s = fate_s
        self._zygote, self._tag, self._client = zygote, tag, int(terms["client"])
        self._log = "" if log_path is None else f"; its log is {log_path}"
        self._lock = threading.Lock()
        self._answers: Dict[int, Dict[str, Any]] = {}
        self._last_ticket = READY
        self.pid = 0  # known when it is ready
        self.lost: Optional[str] = None
        self._ended = False
        self._sock, theirs = wire.pair()
        with theirs:
            zygote.fork("agent", tag, terms, theirs.fileno())
        self._sock.setblocking(False)

    def wait_ready(self, timeout_s: float) -> bool:
        """Return whether the agent has said within `timeout_s` that its store is up."""
        if not self.pid:
            answer = self.answer(READY, timeout_s)
            self.pid = int(answer["pid"]) if answer else self.pid
        return bool(self.pid)

    def ask(self, command: str, fds: Sequence[int] = (), **fields: Any) -> int:
        """Send a request and return its ticket; does not wait."""
        with self._lock:
            self._check()
            self._last_ticket += 1
            message = {"ticket": self._last_ticket, "command": command, "fields": fields}
            try:
                wire.send(self._sock, message, fds)
            except BlockingIOError:
                self._lose("does not take requests any more: it stands still")
            except OSError:  # it has closed its end, which it does by ending
                self._ended = True
                self._lose(None)
            self._check()
            return self._last_ticket

    def hear(self) -> None:
        """Take in what it has said, or that it has ended; does not wait."""
        with self._lock:
            self._drain()

    def take(self, ticket: int) -> Optional[Dict[str, Any]]:
        """Return the answer to `ticket`, an error's text in it, where it has been heard."""
        with self._lock:
            return self._answers.pop(ticket, None)

    def answer(self, ticket: int, timeout_s: float) -> Optional[Dict[str, Any]]:
        """Return the answer to `ticket`, or None where there is none after `timeout_s`.

        Raises
        ------
        CenterError
            Where the agent is lost or the answer is an error.
        """
        end = time.monotonic() + timeout_s
        poll = select.poll()  # select.select would refuse descriptors of 1024 and more
        with self._lock:
            if self._sock.fileno() >= 0:
                poll.register(self._sock, select.POLLIN)
        while True:
            with self._lock:
                self._drain()
                found = self._answers.pop(ticket, None)
                if found is None:
                    self._check()
            if found is not None:
                if "error" in found:
                    raise CenterError(f"client {self._client}: {found['error']}")
                return found
            left = end - time.monotonic()
            if left <= 0:
                return None
            poll.poll(1000 * min(left, _POLL_S))

    def call(
        self, what: str, limit_s: float, command: str, fds: Sequence[int] = (), **fields: Any
    ) -> None:
        """Send a request and wait for its answer; past `limit_s` the agent is given up."""
        if self.answer(self.ask(command, fds, **fields), limit_s) is None:
            self.give_up(f"no answer within {limit_s:g} s to {what}")

    def give_up(self, why: str) -> None:
        """End an agent that is stuck, and raise CenterError."""
        with self._lock:
            self._lose(f"was given up: {why}")
            self._check()

    def drop(self, why: str) -> None:
        """End the agent, stuck or not; does not wait for it."""
        with self._lock:
            self._lose(why)

    def close(self) -> None:
        """Drop the agent and forget it; does not wait."""
        with self._lock:
            self._lose("was closed")
            self._sock.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable when something came, or when it has ended."""
        return self._sock.fileno()

    @property
    def ended(self) -> bool:
        """Whether it is dead and so writes to no memory any more; looks, does not wait."""
        with self._lock:
            try:
                while not self._ended and self._sock.fileno() >= 0:
                    wire.receive(self._sock)  # what comes from one that was dropped is void
            except BlockingIOError:
                return False
            except (EOFError, OSError):
                self._ended = True
            return True

    def _check(self) -> None:
        if self.lost is not None:
            who = f"its agent (pid {self.pid})" if self.pid else "its agent"
            raise CenterError(f"client {self._client}: {who} {self.lost}{self._log}")

    def _drain(self) -> None:
        try:
            while self.lost is None:
                message, _ = wire.receive(self._sock)
                self._answers[message["ticket"]] = message
        except BlockingIOError:
            pass
        except (KeyError, TypeError, ValueError) as error:
            self._lose(f"sent what is no answer: {error!r:.100}")
        except (EOFError, OSError):
            self._ended = True
            self._lose(None)

    def _lose(self, why: Optional[str]) -> None:
        """Note why the agent is lost (None: its end was seen) and shut the socket."""
        if self.lost is None:
            self.lost = self._zygote.fate(self._tag, self._fate_s) if why is None else why
            self._zygote.kill(self._tag)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)  # it sees this; what it closes is seen here
            if self.pid and not self._ended:  # then the number is still its own
                with contextlib.suppress(OSError):
                    os.kill(self.pid, signal.SIGKILL)
