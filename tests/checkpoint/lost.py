"""A rank of a job under rule sgd that loses a process in mid-epoch.

    python -m tests.checkpoint.lost FOLDER VICTIM

VICTIM is the client, "0" or "1", whose last rank is killed in its first life, "server", or
"nobody"; "rounds" is a server that dies while client 0 has rounds under way and client 1 none;
``client0.early`` dies before the first step. Rank K writes FOLDER/rankK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from gluon_esgd import world
from gluon_esgd.launch import proc

from ..pool import until
from . import loops

WHEN = (1, 1)  # epoch and batch


def servers() -> list:
    """The processes of this job's servers, by their logs."""
    settings = world().settings
    found = []
    for pid in proc.job_processes(proc.marker(str(settings.job_dir))):
        try:
            log = os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
        except OSError:
            continue
        if log.startswith("server"):
            found.append(pid)
    return found


def kill_under_way(folder: Path) -> None:
    """Kill the servers in the next step, when client 0 has started two rounds and client 1 none."""
    from gluon_esgd.rounds import ClientRounds

    me, killed, start_sum = world(), folder / "killed", ClientRounds.start_sum

    def start(self: Any, number: int, *args: Any) -> None:
        if me.client == 1:
            until(killed.exists, 30.0)
        start_sum(self, number, *args)
        if me.client == 0 and number == 1:
            for pid in servers():
                os.kill(pid, signal.SIGKILL)
            killed.touch()

    ClientRounds.start_sum = start  # type: ignore[method-assign]


def kill(victim: str, place: tuple, folder: Path) -> None:
    """Kill what is to be killed now."""
    me = world()
    if me.settings.life or place != WHEN:
        return
    if victim == str(me.client) and me.rank == me.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if victim == "rounds":
        kill_under_way(folder)
    if victim == "server" and me.worker_rank == 0:
        for pid in servers():
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Train."""
    folder, victim = Path(sys.argv[1]), sys.argv[2]
    before = lambda epoch, batch: kill(victim, (epoch, batch), folder)  # noqa: E731
    outcome = loops.run(str(folder / "checkpoints"), before=before)
    assert outcome is not None
    said = {"weights": outcome.weights, "seen": outcome.seen, "life": world().settings.life}
    (folder / f"rank{world().worker_rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
