"""Signals the ranks of an MPI job on this machine.

``python -m gluon_esgd.launch.tell CLIENT RANKS`` is what the launcher runs on another host: it
waits for one letter on standard input, the same that stands for a signal on a control channel.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Callable, Dict, Optional, Sequence

from ..settings import PREFIX
from . import proc
from .rank import rank_of

__all__ = ["main", "tell_ranks"]

_RANK = ["-m", "gluon_esgd.launch.rank"]
_SIGNALS: Dict[bytes, int] = {b"c": signal.SIGINT, b"t": signal.SIGTERM}


def tell_ranks(number: int, wanted: Callable[[int, int], bool], *markers: str) -> None:
    """Send a signal to the wrappers of ranks here that have no control channel.

    Parameters
    ----------
    number : int
        The signal.
    wanted : callable
        ``wanted(client, rank)``: by the first client of the MPI job, and the number in it.
    *markers : str
        NAME=VALUE, all of which are in their environment.
    """
    for pid, argv in proc.job_processes(*markers).items():
        if argv[1:3] != _RANK or "--control" in argv[: argv.index("--")]:
            continue
        environ = proc.environment(pid)
        if wanted(int(environ.get(f"{PREFIX}CLIENT", 0)), rank_of(environ)):
            proc.signal_quietly(pid, number)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Signal the ranks that the command line names; return 0."""
    proc.die_with_parent(signal.SIGTERM)
    client_marker, listed = sys.argv[1:] if argv is None else argv
    ranks = {int(rank) for rank in listed.split(",")}
    number = _SIGNALS.get(os.read(0, 1))
    if number is not None:  # else the launcher has ended
        markers = proc.marker(os.environ[f"{PREFIX}JOB_DIR"]), client_marker
        tell_ranks(number, lambda _, rank: rank in ranks, *markers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
