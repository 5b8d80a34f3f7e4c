"""Runs a planned job on one thread: start, watch, relay, end everything."""

from __future__ import annotations

import os
import re
import select
import selectors
import signal
import sys
import time
from typing import Dict, List, Mapping, Optional, Sequence

from . import proc
from .child import Child
from .ending import Ending
from .guard import Guard
from .plan import Process
from .state import Failure, first_failed_rank, missing_ranks
from .terminal import Terminal
from .wakeup import SignalPipe

__all__ = ["Runner"]

_LOOK_S = 0.25  # how often reports of ranks and deadlines are looked at
# MPICH's own words on a failure, to standard output; ours name the rank, so these go to the log.
_BANNER = re.compile(rb"\n=+\n=   BAD TERMINATION.*", re.DOTALL)
_ASKED = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Runner:
    """The life of one job.

    Parameters
    ----------
    processes : sequence of Process
        The plan.
    job_dir : str
        Absolute path of the job's folder, which exists.
    client_size : int
        Ranks in each client.
    start_timeout_s : float
        How long all ranks may take to report their start.
    environ : mapping of str to str
        The launcher's environment.
    output : int, default 1
        File descriptor that gets what the ranks print.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        job_dir: str,
        client_size: int,
        start_timeout_s: float,
        environ: Mapping[str, str],
        output: int = 1,
    ) -> None:
        self._processes, self._environ = processes, environ
        self._job_dir, self._client_size = job_dir, client_size
        self._start_timeout_s = start_timeout_s
        self._children: List[Child] = []
        self._terminal = Terminal(output)
        self._selector = selectors.PollSelector()
        self._lines: Dict[int, bytes] = {}
        self._failure: Optional[Failure] = None
        self._all_started = False
        self._marker = proc.marker(job_dir)
        self._ending = Ending(self._children, self._marker)
        self._began = time.monotonic()
        self._signals = SignalPipe([*_ASKED, signal.SIGCHLD])

    def run(self) -> int:
        """Run the job to its end; return the exit code."""
        began, guard = time.time(), Guard(self._marker)
        self._selector.register(self._signals, selectors.EVENT_READ)
        try:
            self._start()
            while not self._ending.done():
                self._step()
        finally:
            self._ending.sweep()
            self._drain()
            proc.clean_shared_memory(began)
            guard.dismiss()
        return self._verdict()

    def _start(self) -> None:
        for process in self._processes:
            try:
                child = Child(process, self._environ)
            except OSError as error:
                how = f"failed: {process.argv[0]} cannot be started ({error.strerror})"
                return self._fail(Failure(process.name, how, 1, time.time()))
            self._children.append(child)
            for fd in child.output:
                self._selector.register(fd, selectors.EVENT_READ, child)

    def _step(self) -> None:
        for key, _ in self._selector.select(_LOOK_S):
            if key.data is None:
                self._on_signals()
            else:
                self._relay(key.fd, key.data)
        self._terminal.flush(0)
        self._look()
        self._ending.step()

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

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number != signal.SIGCHLD:
                self._asked_to_end(number)

    def _asked_to_end(self, number: int) -> None:
        if self._ending.begun:
            return self._ending.hurry()
        name = _ASKED[signal.Signals(number)]
        print(
            f"gluon-esgd: {name}: ending the job; once more kills it", file=sys.stderr, flush=True
        )
        self._fail(Failure("the job", f"was ended by {name}", 128 + number, 0.0))

    def _fail(self, failure: Failure) -> None:
        if self._failure is None or failure.time < self._failure.time:
            self._failure = failure
        self._ending.begin()

    def _look(self) -> None:
        """See who has ended, who has failed, and who never came."""
        codes = {child: child.poll() for child in self._children}
        if self._ending.begun:
            return
        clients = [child for child in codes if child.process.client is not None]
        failed = first_failed_rank(self._job_dir) or self._failed_child(codes)
        if failed is not None:
            self._fail(failed)
        elif all(codes[child] == 0 for child in clients):
            self._ending.begin()
        elif not self._all_started:
            self._look_for_missing(sum(child.process.clients for child in clients))

    def _failed_child(self, codes: Mapping[Child, Optional[int]]) -> Optional[Failure]:
        for child, code in codes.items():
            early = child.process.client is None and code is not None
            if early or code:
                return child.failure()
        return None

    def _look_for_missing(self, clients: int) -> None:
        missing = missing_ranks(self._job_dir, clients, self._client_size)
        self._all_started = not missing
        if missing and time.monotonic() - self._began > self._start_timeout_s:
            names = ", ".join(f"client {client} rank {rank}" for client, rank in missing)
            how = f"failed: not started within {self._start_timeout_s:g} s (--start-timeout)"
            self._fail(Failure(names, how, 1, time.time(), self._log_of(missing[0][0])))

    def _log_of(self, client: int) -> Optional[str]:
        for process in (child.process for child in self._children):
            if process.client is not None and 0 <= client - process.client < process.clients:
                return process.log
        return None

    def _drain(self) -> None:
        """Show what is still in the pipes, then give everything back."""
        for child in self._children:
            for fd in child.output:
                while fd in self._selector.get_map() and _readable(fd):
                    self._relay(fd, child)
            child.close()
        self._terminal.flush(1.0)
        self._signals.close()
        self._selector.close()

    def _verdict(self) -> int:
        """Name the failure that came first, if any; return the exit code of the launcher."""
        found = [f for f in (self._failure, first_failed_rank(self._job_dir)) if f is not None]
        if self._failure is None:
            return 0
        first = min(found, key=lambda failure: failure.time)
        print(first.text(), file=sys.stderr, flush=True)
        return first.code


def _readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])
