"""A process that the launcher started: its streams, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Dict, List, Mapping, Optional

from ..settings import PREFIX
from . import proc
from .plan import Process
from .state import Failure, exit_code

__all__ = ["Child", "clean_environment"]

# What stands for a signal on the control channel of a rank on another host.
CONTROL: Dict[int, bytes] = {signal.SIGINT: b"c", signal.SIGTERM: b"t"}
_DROPPED = ("DMLC_", "PS_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", PREFIX)


def clean_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the environment that children start from.

    Without the parameter server's own variables (``PORT`` too, which any of
    its processes would bind) and those of an outer job.
    """
    return {
        name: value
        for name, value in environ.items()
        if name != "PORT" and not name.startswith(_DROPPED)
    }


class Child:
    """One started `Process`, in a session of its own, so that Ctrl-C reaches only us.

    Parameters
    ----------
    process : Process
        What to start.
    environ : mapping of str to str
        The launcher's environment.

    Raises
    ------
    OSError
        The command cannot be run.
    """

    def __init__(self, process: Process, environ: Mapping[str, str]) -> None:
        self.process = process
        self.ended_at = 0.0
        self._environ = environ
        self._tellers: List[Child] = []
        self._log = open(process.log, "ab", buffering=0)  # noqa: SIM115 -- open as long as we
        talks = process.remote or process.station is not None
        shows = process.client is not None or process.station is not None
        self._popen = subprocess.Popen(
            process.argv,
            env={**clean_environment(environ), **process.env},
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if shows else self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=_die_with_launcher,
        )
        self.output: List[int] = []
        if self._popen.stdout is not None:
            os.set_blocking(self._popen.stdout.fileno(), False)
            self.output = [self._popen.stdout.fileno()]
        if self._popen.stdin is not None:
            os.set_blocking(self._popen.stdin.fileno(), False)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    def poll(self) -> Optional[int]:
        """Return the return code once it has ended (-N: signal N), else None."""
        if self._popen.poll() is not None and not self.ended_at:
            self.ended_at = time.time()
        for teller in self._tellers:
            teller.poll()
        return self._popen.returncode

    @property
    def input(self) -> Optional[int]:
        """Descriptor of its standard input, while that is ours to write."""
        return None if self._popen.stdin is None else self._popen.stdin.fileno()

    def pass_on(self, number: int) -> None:
        """Pass SIGINT or SIGTERM on to what it has started on other hosts."""
        if self.input is not None:
            with contextlib.suppress(OSError):  # it is ending already
                os.write(self.input, CONTROL[number])
        for teller in self.process.tellers:
            self._tell(teller, number)

    def _tell(self, teller: Process, number: int) -> None:
        try:
            child = Child(teller, self._environ)
        except OSError as error:
            self.note(f"{teller.name}: {error.strerror}\n".encode())
            return
        self._tellers.append(child)
        child.pass_on(number)

    def end(self, number: int) -> None:
        """Send a signal if it still runs, and close its control channel."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()
            self._popen.stdin = None
        if self.poll() is None:
            proc.signal_quietly(self.pid, number)
        if number == signal.SIGKILL:
            for teller in self._tellers:
                teller.end(number)

    def note(self, text: bytes) -> None:
        """Add to the log of this process."""
        self._log.write(text)

    def close(self) -> None:
        """Close files and streams."""
        for teller in self._tellers:
            teller.end(signal.SIGKILL)
            teller.close()
        for stream in (self._log, self._popen.stdout, self._popen.stdin):
            if stream is not None:
                stream.close()
        self.output, self._popen.stdin = [], None

    def failure(self) -> Failure:
        """Describe its end as the failure of the job."""
        code, how = exit_code(self._popen.returncode)
        who = f"{self.process.name} (pid {self.pid} on {self.process.host})"
        return Failure(who, how, code, self.ended_at, self.process.log)


def _die_with_launcher() -> None:
    proc.die_with_parent(signal.SIGTERM)
