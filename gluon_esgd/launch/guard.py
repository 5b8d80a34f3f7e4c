"""The last resort: a small process that outlives a killed launcher and ends its job.

The kernel tells children of a killed launcher to end, but nobody tells what
they left behind: processes in sessions of their own, files in shared memory.
The guard reads the launcher's pipe; an end of file without a farewell is its cue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Optional, Sequence

from . import proc

__all__ = ["Guard", "main"]

GRACE_S = 5.0  # ranks end in order when their parents die; then they are killed
_FAREWELL = b"."


class Guard:
    """The launcher's side: start the guard, and dismiss it when the job has ended.

    Parameters
    ----------
    marker : str
        NAME=VALUE that marks the job's processes in their environment.
    """

    def __init__(self, marker: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "gluon_esgd.launch.guard", marker, repr(time.time())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Tell the guard that all has ended, and wait for it to go."""
        try:
            self._popen.communicate(_FAREWELL, timeout=5)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Wait for the launcher's farewell or its death; in the latter case end its job."""
    marker, since = sys.argv[1:] if argv is None else argv
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1) == _FAREWELL:
        return 0
    limit = time.monotonic() + GRACE_S
    while proc.job_processes(marker) and time.monotonic() < limit:
        time.sleep(0.1)
    proc.kill_job(marker)
    proc.clean_shared_memory(float(since))
    return 0


if __name__ == "__main__":
    sys.exit(main())
