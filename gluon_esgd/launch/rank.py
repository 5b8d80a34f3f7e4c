"""One rank: takes its cores, runs the user's command, keeps its log, reports start and end.

``python -m gluon_esgd.launch.rank [--control] -- CMD`` is what ``mpiexec`` or
the launcher starts; who it is comes from the environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from ..durable import write_whole
from ..settings import RANK_VARIABLES, Settings, read
from . import proc
from .gpus import VISIBLE, gpus_of, mates, share
from .relay import Relay, split_command

__all__ = ["core_set", "main", "place_of", "rank_of"]

_CANNOT_RUN = 127
LAUNCHER_FIRST_S = 10.0  # after a grace: the launcher interrupts, then terminates, then kills
_HELD_BYTES = 4096  # of the leader's unfinished line


def rank_of(environ: Mapping[str, str]) -> int:
    """Return the rank that ``mpiexec`` announced, 0 without one."""
    return next((int(environ[name]) for name in RANK_VARIABLES if name in environ), 0)


def place_of(settings: Settings, number: int) -> Tuple[int, int]:
    """Return the client of rank `number` of its MPI job, and its rank there."""
    if settings.is_split and settings.client_size is not None:
        return divmod(number, settings.client_size)
    return settings.client, number


def core_set(cores: Sequence[int], place: int, workers: int) -> List[int]:
    """Return the cores of the worker at `place` among `workers` of its machine.

    A contiguous share of ``len(cores) // workers`` each; with more workers than
    cores one core each, round-robin.
    """
    share = len(cores) // workers
    if share == 0:
        return [cores[place % len(cores)]]
    return list(cores[place * share : (place + 1) * share])


class _Output:
    """Copies a rank's output to its log and to the terminal.

    The leader of client 0 goes to the terminal raw, so that a progress bar
    works, but a line in pieces (an unbuffered ``print`` writes each argument by
    itself) is held for a moment, or others' lines would get into it. The other
    ranks go line by line, each line with who says it.
    """

    def __init__(self, log: Path, client: int, rank: int) -> None:
        self._log = open(log, "ab", buffering=0)  # noqa: SIM115 -- open until the process ends
        self._prefix = f"[client {client} rank {rank}] ".encode() if client or rank else b""
        self._line = b""

    def write(self, chunk: bytes) -> None:
        self._log.write(chunk)
        *lines, self._line = (self._line + chunk).split(b"\n")
        self._show(b"".join(self._marked(line) for line in lines))
        if len(self._line) > _HELD_BYTES:
            self.pause()

    def pause(self) -> None:
        """Show the leader's unfinished line."""
        if not self._prefix:
            self._show(self._line)
            self._line = b""

    def finish(self) -> None:
        """Show what is left."""
        self.pause()
        if self._line:
            self._show(self._marked(self._line))

    def _marked(self, line: bytes) -> bytes:
        if not self._prefix:
            return line + b"\n"
        visible = line.rstrip(b"\r").rpartition(b"\r")[2]  # what a terminal would show
        return self._prefix + visible + b"\n"

    def _show(self, text: bytes) -> None:
        try:
            while text:
                text = text[os.write(1, text) :]
        except OSError:
            pass  # nobody reads any more; the log still does


def _places(settings: Settings) -> List[Tuple[int, int]]:
    """Place and workers of each rank of this MPI job on its machine; none under plain mpirun."""
    pairs = (part.partition("/") for part in (settings.places or "").split(";") if part)
    return [(int(place), int(workers)) for place, _, workers in pairs]


def _take_gpus(settings: Settings, number: int, rank: int) -> None:
    """See the GPUs of this client only, where other clients share the machine."""
    places, gpus = _places(settings), gpus_of(os.environ)
    if not places or len(gpus) < 2:
        return
    first = number - rank
    mine, workers = mates(places[first : first + (settings.client_size or len(places))], rank)
    if len(mine) < workers:
        os.environ[VISIBLE] = ",".join(share(gpus, mine, workers))


def _bind(settings: Settings, number: int) -> None:
    """Take this rank's cores and cap its threads, before the child starts any."""
    if settings.bind == "none":
        return
    place, workers = _places(settings)[number]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, core_set(cores, place, workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores) // workers)))


def _report(path: Path, **what: Any) -> None:
    """Write a state file in one piece: whoever reads it never sees half of it."""
    report = {"host": socket.gethostname(), "time": time.time(), **what}
    write_whole(path, json.dumps(report).encode(), synced=False)  # the launcher lives and reads


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command after ``--`` as a rank; return its code, 128 + N for signal N."""
    proc.die_with_parent(signal.SIGTERM)
    flags, command = split_command(sys.argv[1:] if argv is None else argv)
    settings, number = read(), rank_of(os.environ)
    folder, (client, rank) = Path(settings.job_dir or "."), place_of(settings, number)
    name = f"client{client}.rank{rank}"
    _bind(settings, number)
    _take_gpus(settings, number, rank)
    os.environ["PYTHONUNBUFFERED"] = "1"
    for part in ("logs", "state"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    output = _Output(folder / "logs" / f"{name}.log", client, rank)
    relay = Relay(
        command,
        output.write,
        output.pause,
        control="--control" in flags,
        grace_s=settings.grace_s + LAUNCHER_FIRST_S,
    )
    pid, code = _run(relay, command, output, folder / "state" / f"{name}.start")
    output.finish()
    end = {"signal": proc.signal_name(-code)} if code < 0 else {"returncode": code}
    _report(folder / "state" / f"{name}.exit", pid=pid, **end)
    return 128 - code if code < 0 else code


def _run(relay: Relay, command: Sequence[str], output: _Output, started: Path) -> Tuple[int, int]:
    try:
        relay.start()
    except OSError as error:
        output.write(f"{command[0]}: {error.strerror or error}\n".encode())
        return os.getpid(), _CANNOT_RUN
    _report(started, pid=relay.pid)
    return relay.pid, relay.wait()


if __name__ == "__main__":
    sys.exit(main())
