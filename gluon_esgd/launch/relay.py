"""Runs one command as a child and answers for it: signals, control channel, its whole tree.

``python -m gluon_esgd.launch.relay [--control] -- CMD`` is how a station runs on
another host: when the connection ends, so does the command.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Callable, List, Optional, Sequence, Tuple

from . import proc
from .wakeup import SignalPipe

__all__ = ["Relay", "main", "split_command"]

TERM_AFTER_S = 3.0  # from SIGINT to SIGTERM
KILL_AFTER_S = 2.0  # from SIGTERM to SIGKILL
QUIET_S = 0.05  # output that pauses this long is shown, finished line or not
ORPHANS_S = 1.0  # what the child left behind has this long after SIGTERM
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Relay:
    """The life of one child process.

    Parameters
    ----------
    command : sequence of str
        What to run.
    on_output : callable
        Gets the child's standard output and error, as chunks of bytes.
    on_quiet : callable, optional
        Called when output has paused for `QUIET_S`.
    control : bool
        Standard input belongs to the launcher: ``c`` is a SIGINT, ``t`` a SIGTERM with all its
        grace, end of file one that is followed up soon.
    grace_s : float
        From a SIGTERM to SIGKILL, unless this process has lost its parent.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_output: Callable[[bytes], None],
        on_quiet: Callable[[], None] = lambda: None,
        control: bool = False,
        grace_s: float = KILL_AFTER_S,
    ) -> None:
        self._parent, self._grace_s = os.getppid(), grace_s
        self._command = list(command)
        self._on_output, self._on_quiet = on_output, on_quiet
        self._selector = selectors.DefaultSelector()
        self._signals = SignalPipe([*_FORWARDED, signal.SIGCHLD])
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        if control:
            self._selector.register(0, selectors.EVENT_READ, self._on_control)
        self._control = control
        self._escalation: List[Tuple[float, int]] = []
        self._status: Optional[int] = None
        self._output_open, self._spoke = True, False
        self.pid = 0

    def start(self) -> None:
        """Start the child; it is killed when this process ends in whatever way.

        Raises
        ------
        OSError
            The command cannot be run.
        """
        proc.adopt_orphans()
        reading, writing = os.pipe()
        # close_fds=False: MPI's own connection (PMI_FD) is inherited.
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL if self._control else None,
            stdout=writing,
            stderr=writing,
            close_fds=False,
            preexec_fn=_die_with_relay,
        )
        os.close(writing)
        os.set_blocking(reading, False)
        self._selector.register(reading, selectors.EVENT_READ, self._on_pipe)
        self.pid = child.pid
        child.returncode = 0  # reaped here, with the orphans, not by Popen

    def wait(self) -> int:
        """Relay until the child ends, end what it left, and return its code (-N: signal N)."""
        while self._status is None:
            if not self._step(self._next_deadline()):
                self._on_quiet()
                self._spoke = False
            self._escalate()
        self._end_orphans()
        return _returncode(self._status)

    def _step(self, timeout: Optional[float]) -> bool:
        events = self._selector.select(timeout)
        for key, _ in events:
            key.data(key)
        return bool(events)

    def _on_pipe(self, key: selectors.SelectorKey) -> None:
        chunk = os.read(key.fd, 65536)
        if chunk:
            self._on_output(chunk)
            self._spoke = True
        else:
            self._output_open = False
            self._selector.unregister(key.fd)
            os.close(key.fd)

    def _on_control(self, key: selectors.SelectorKey) -> None:
        told = os.read(0, 64)
        if not told:
            self._selector.unregister(key.fd)
            self._end(signal.SIGTERM, KILL_AFTER_S)
        if b"c" in told:
            self._end(signal.SIGINT)
        elif b"t" in told:
            self._end(signal.SIGTERM, self._grace_s)

    def _on_signals(self, key: selectors.SelectorKey) -> None:
        for number in self._signals.take():
            if number == signal.SIGCHLD:
                self._reap()
            elif number == signal.SIGINT:
                self._end(signal.SIGINT)
            else:  # without the parent it comes from the kernel, and nobody gives any time
                asked = number == signal.SIGTERM and os.getppid() == self._parent
                self._end(signal.SIGTERM, self._grace_s if asked else KILL_AFTER_S)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == self.pid:
                self._status = status
            elif pid == 0:
                return

    def _end(self, number: int, kill_after_s: float = KILL_AFTER_S) -> None:
        """Forward a signal, and let harder ones follow."""
        proc.signal_quietly(self.pid, number)
        now = time.monotonic()
        if number == signal.SIGTERM:
            self._escalation = [(now + kill_after_s, signal.SIGKILL)]
        elif not self._escalation:
            kill = (now + TERM_AFTER_S + KILL_AFTER_S, signal.SIGKILL)
            self._escalation = [(now + TERM_AFTER_S, signal.SIGTERM), kill]

    def _escalate(self) -> None:
        while self._escalation and self._escalation[0][0] <= time.monotonic():
            proc.signal_quietly(self.pid, self._escalation.pop(0)[1])

    def _next_deadline(self) -> Optional[float]:
        due = [max(0.0, at - time.monotonic()) for at, _ in self._escalation[:1]]
        return min([*due, *[QUIET_S] * self._spoke], default=None)

    def _end_orphans(self) -> None:
        """End descendants that outlived the child, then take what is left of the output."""
        limit, number = time.monotonic() + ORPHANS_S, signal.SIGTERM
        left = proc.descendants(os.getpid())
        while left and time.monotonic() < limit + ORPHANS_S:  # not for ever: some may not be ours
            for pid in left:
                proc.signal_quietly(pid, number)
            self._step(0.05)
            self._reap()
            number = signal.SIGKILL if time.monotonic() > limit else signal.SIGTERM
            left = proc.descendants(os.getpid())
        while self._output_open and self._step(0.1):
            pass


def _die_with_relay() -> None:
    proc.die_with_parent(signal.SIGKILL)


def _returncode(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def split_command(argv: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Split ``FLAGS... -- CMD...`` into the two lists."""
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def _copy(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command after ``--``; return its exit code, 128 + N for signal N."""
    flags, command = split_command(sys.argv[1:] if argv is None else argv)
    proc.die_with_parent(signal.SIGTERM)
    relay = Relay(command, _copy, control="--control" in flags)
    relay.start()
    code = relay.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
