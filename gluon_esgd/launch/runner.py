"""Runs a planned job on one thread: start, watch, relay, end everything."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import selectors
import signal
import sys
import time
from functools import partial
from typing import Any, Dict, List, Optional

from ..errors import LaunchError
from . import growth, proc
from .child import Child
from .control import Control
from .ending import Ending
from .guard import Guard
from .lives import Lives, Restarts
from .plan import (
    Process,
    Site,
    client_process,
    leader_at,
    plan,
    servers_at,
    station_process,
)
from .spec import JobSpec
from .state import Failure, first_failed_rank, keep_end
from .stations import Stations
from .status import describe
from .terminal import Terminal
from .terms import Terms
from .wakeup import SignalPipe

__all__ = ["Runner"]

_LOOK_S = 0.25  # how often reports of ranks and deadlines are looked at
_LAST_WORDS_S = 2.0  # what ranks have to fail by themselves when the center has failed
_RESTARTS = 3  # of a client that can come back to a center
# MPICH's own words on a failure, to standard output; ours name the rank, so these go to the log.
_BANNER = re.compile(rb"\n=+\n=   BAD TERMINATION.*", re.DOTALL)
_ASKED = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Runner:
    """The life of one job.

    Parameters
    ----------
    spec : JobSpec
        The job.
    site : Site
        The machine; the job's folder exists.
    output : int, default 1
        File descriptor that gets what the ranks print.
    """

    def __init__(self, spec: JobSpec, site: Site, output: int = 1) -> None:
        self._spec, self._site = spec, site
        self._job_dir = site.job_dir
        self._start_limit_s = spec.start_timeout_s or site.base.start_timeout_s
        self._children: List[Child] = []
        self._terminal = Terminal(output)
        self._selector = selectors.PollSelector()
        self._lines: Dict[int, bytes] = {}
        self._failure: Optional[Failure] = None
        self._marker = proc.marker(site.job_dir)
        self._ending = Ending(self._children, self._marker)
        self._stations: Optional[Stations] = None
        self._lives = Lives(
            site.job_dir,
            spec.client_size,
            self._start_limit_s,
            start=self._start_client,
            drop=self._drop,
            restarts=self._restarts,
            let_fail=self._let_fail,
            grace_s=spec.grace_s,
            joined=self._joined,
            leave=self._leave,
            begin_anew=self._begin_anew,
            fail=self._fail,
        )
        self._grace_until = 0.0  # of the end
        self._last_words_until: Optional[float] = None  # of ranks that have lost the center
        self._signals = SignalPipe([*_ASKED, signal.SIGCHLD])

    def run(self) -> int:
        """Run the job to its end; return the exit code."""
        began, guard = time.time(), Guard(self._marker)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        control = Control(self._job_dir, self._selector, self._answer)
        try:
            self._begin()
            while not self._ending.done():
                self._step()
                control.look()
        finally:
            control.close()
            self._ending.sweep()
            self._drain()
            proc.clean_shared_memory(began)
            guard.dismiss()
        return self._verdict()

    def _begin(self) -> None:
        processes = plan(self._spec, self._site)
        stations = [process for process in processes if process.client is None]
        try:
            if stations:
                self._stations = self._new_stations(stations)
            self._lives.begin([p.client for p in processes if p.client is not None])
        except LaunchError:
            pass  # told, and ending

    def _new_stations(self, processes: List[Process]) -> Stations:
        spec = self._spec
        terms = Terms(
            clients=range(spec.clients),
            scheduler_at=0,
            servers_at=servers_at(spec),
            address=self._site.address,
            port=spec.port or 0,
            secret=secrets.token_hex(32),
            start_limit_s=self._start_limit_s,
        )
        leaders_at = [leader_at(spec, client) for client in range(spec.clients)]
        return Stations(
            terms,
            processes,
            leaders_at,
            self._job_dir,
            self._start,
            self._drop,
            self._selector,
            self._center_failed,
        )

    def _start(self, process: Process) -> Child:
        """Start a process; where it cannot be, the job fails and LaunchError is raised."""
        try:
            child = Child(process, self._site.environ)
        except OSError as error:
            how = f"failed: {process.argv[0]} cannot be started ({error.strerror})"
            self._fail(Failure(process.name, how, 1, time.time()))
            raise LaunchError(how) from None
        self._children.append(child)
        return child

    def _start_client(self, client: int, life: int) -> Child:
        child = self._start(client_process(self._spec, self._site, client, life))
        for fd in child.output:
            self._selector.register(fd, selectors.EVENT_READ, partial(self._relay, fd, child))
        return child

    def _step(self) -> None:
        for key, _ in self._selector.select(_LOOK_S):
            key.data()
        self._terminal.flush(0)
        self._look()
        self._ending.step()

    def _look(self) -> None:
        for child in self._children:
            child.poll()
        if self._ending.begun:
            return self._look_in_grace()
        try:
            if self._stations is not None:
                self._stations.look()
            if self._last_words_until is not None:
                return self._look_at_last_words(self._last_words_until)
            if not self._ending.begun:
                self._lives.look()
        except LaunchError:
            return
        if self._lives.are_over and not self._ending.begun:
            self._end()

    def _look_at_last_words(self, until: float) -> None:
        """Let ranks say in which bucket and step they have lost the center."""
        clients = (child for child in self._children if child.process.client is not None)
        if time.monotonic() > until or all(child.poll() is not None for child in clients):
            self._end()

    def _end(self, grace_s: float = 0.0) -> None:
        self._grace_until = time.monotonic() + grace_s
        self._ending.begin(grace_s)
        self._look_in_grace()

    def _look_in_grace(self) -> None:
        """Let leaders have a center as long as ranks save; then follow the stations no more."""
        if self._stations is None:
            return
        clients = (child for child in self._children if child.process.client is not None)
        if time.monotonic() < self._grace_until and any(c.poll() is None for c in clients):
            with contextlib.suppress(LaunchError):
                self._stations.look()
        else:
            self._stations.end()

    # Who may start again.

    def _restarts(self) -> Restarts:
        spec, most = self._spec, self._spec.max_restarts
        whole = self._stations is None or bool(self._stations.generations.sync)
        if most is None:
            most = 0 if whole else _RESTARTS
        return Restarts(most, whole, spec.min_clients or spec.clients)

    def _joined(self, client: int) -> bool:
        return self._stations is None or client in self._stations.generations.joined

    def _leave(self, client: int) -> None:
        if self._stations is not None:
            self._stations.generations.leave(client)

    def _let_fail(self, why: str) -> None:
        if self._stations is not None:
            self._stations.generations.give_up(why)

    def _center_failed(self, failure: Failure) -> None:
        if self._ending.begun:
            self._fail(failure)
        elif self._last_words_until is None and not self._lives.restart_all(failure):
            self._failure = failure
            self._let_fail(f"{failure.who} {failure.how}")
            self._last_words_until = time.monotonic() + _LAST_WORDS_S

    def _begin_anew(self) -> None:
        if self._stations is not None:
            self._stations.begin_anew()

    # What others ask.

    def _answer(self, question: Dict[str, Any]) -> Dict[str, Any]:
        """Answer ``gluon-esgd status`` and its like; ValueError says why not."""
        do, client, host = (question.get(name) for name in ("do", "client", "host"))
        if do == "status":
            generations = None if self._stations is None else self._stations.generations
            return describe(self._lives.places, generations)
        if self._ending.begun:
            raise ValueError("the job is ending")
        if do == "add-client" and (host is None or isinstance(host, str)):
            return {"said": self._add_client(host)}
        if do == "remove-client" and type(client) is int:
            return {"said": self._lives.remove(client, self._spec.grace_s)}
        raise ValueError(f"{question!r:.200} is none of status, add-client, remove-client")

    def _add_client(self, host: Optional[str]) -> str:
        """Start a client in an empty place, else in a new one; return what is done."""
        spec, stations = self._spec, self._stations
        growth.check(spec, None if stations is None else stations.generations.sync)
        assert stations is not None, "growth.check wants servers"
        empty = self._lives.empty
        client = growth.refill(spec, self._site, empty, host)
        try:
            if client is None:
                name = growth.host_for(spec, self._site, empty, host)
                self._site = growth.with_client(self._site, name)
                client = len(self._lives.places)
                number = leader_at(spec, client, self._site.added)
                stations.add_leader(station_process(spec, self._site, number))
            stations.generations.enter(client)
            self._lives.add(client)
        except LaunchError as error:
            raise ValueError(f"{error}; the job ends") from None
        at = [each.name for each in spec.host_list][leader_at(spec, client, self._site.added)]
        return f"client {client} starts on {at}"

    # What they print.

    def _relay(self, fd: int, child: Child) -> None:
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self._selector.unregister(fd)
        for banner in _BANNER.findall(chunk):
            child.note(banner)
        chunk = _BANNER.sub(b"", chunk)
        self._terminal.write(chunk if child.process.client == 0 else self._whole(fd, chunk))

    def _whole(self, fd: int, chunk: bytes) -> bytes:
        """Hold an unfinished line back: pieces of two clients' lines must not mix."""
        text = self._lines.pop(fd, b"") + chunk
        if not chunk:
            return text
        head, newline, rest = text.rpartition(b"\n")
        self._lines[fd] = rest
        return head + newline

    def _drop(self, child: Child) -> None:
        """Give back what belongs to a child that has ended."""
        if child.process.client is not None:
            for fd in child.output:
                while fd in self._selector.get_map() and _readable(fd):
                    self._relay(fd, child)
                if fd in self._selector.get_map():  # somebody who is none of ours holds it
                    self._selector.unregister(fd)
                    self._lines.pop(fd, None)
        child.close()
        self._children.remove(child)

    # How it ends.

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number != signal.SIGCHLD:
                self._asked_to_end(number)

    def _asked_to_end(self, number: int) -> None:
        if self._ending.begun:
            self._grace_until = 0.0
            self._look_in_grace()
            return self._ending.hurry()
        name = _ASKED[signal.Signals(number)]
        grace_s = self._spec.grace_s if number == signal.SIGTERM else 0.0
        when = f" within {grace_s:g} s" if grace_s else ""
        self._say(f"{name}: ending the job{when}; once more kills it")
        self._fail(Failure("the job", f"was ended by {name}", 128 + number, 0.0), grace_s)

    def _fail(self, failure: Failure, grace_s: float = 0.0) -> None:
        if self._failure is None or failure.time < self._failure.time:
            self._failure = failure
        self._end(grace_s)

    def _drain(self) -> None:
        """Show what is still in the pipes, then give everything back."""
        if self._stations is not None:
            self._stations.close()
        for child in list(self._children):
            self._drop(child)
        self._terminal.flush(1.0)
        self._signals.close()
        self._selector.close()

    def _verdict(self) -> int:
        """Name the failure that came first, if any; return the exit code of the launcher."""
        found = [f for f in (self._failure, first_failed_rank(self._job_dir)) if f is not None]
        first = min(found, key=lambda failure: failure.time) if self._failure else None
        keep_end(self._job_dir, first)
        if first is None:
            return 0
        print(first.text(), file=sys.stderr, flush=True)
        return first.code

    @staticmethod
    def _say(text: str) -> None:
        print(f"gluon-esgd: {text}", file=sys.stderr, flush=True)


def _readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])
