"""Kills processes of a running job, one after the other, and measures how it recovers.

    python benchmarks/chaos.py --kills 20 --output benchmarks/results/chaos.json

starts 3 clients of 2 ranks with 2 servers through ``gluon-esgd run``, which train a convex
problem (`chaos_worker.py`), once undisturbed and once while ranks, servers, agents, schedulers,
zygotes and stations are killed with SIGKILL in a random order that `--seed` fixes. The job must
end by itself, come to the loss of the undisturbed one, and leave nothing behind.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Set

from common import describe, write

from gluon_esgd.launch import proc

WORKER = Path(__file__).with_name("chaos_worker.py")
ZYGOTE, STATION, RANK = (
    f"gluon_esgd.{name}" for name in ("center.zygote", "center.station", "launch.rank")
)
KINDS = ("rank", "server", "scheduler", "agent", "zygote", "station")
LOOK_S = 0.05


def arguments(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="of each client")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rule", choices=["esgd", "asgd"], default="esgd")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["rank", "server"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ballast", type=int, default=0, help="further floats in the center")
    parser.add_argument("--epochs", type=int, default=30, help="at least; until all kills are made")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one recovery")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    return parser.parse_args(argv)


_Raw = argparse.RawDescriptionHelpFormatter


class Job:
    """A running job in a folder of its own."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.folder, self.enough = folder, folder / "enough"
        self.marker = proc.marker(str(folder / "job"))
        counts = ["-n", args.clients * args.ranks, "--clients", args.clients]
        flags = [*counts, "--servers", args.servers, "--rule", args.rule, "--interval", 5]
        run = [sys.executable, "-m", "gluon_esgd.launch", *map(str, flags)]
        run += ["--max-restarts", "1000", "--job-dir", str(folder / "job")]
        work = [args.epochs, args.ballast, folder]
        command = [*run, sys.executable, str(WORKER), *map(str, work)]
        self.output = open(folder / "output", "wb")  # noqa: SIM115 -- open as long as we
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT
        )

    def processes(self) -> Dict[str, List[int]]:
        """Return the processes of the job by kind."""
        argvs = proc.job_processes(self.marker)
        parents = {pid: _parent(pid) for pid in argvs}
        found: Dict[str, List[int]] = {kind: [] for kind in KINDS}
        for pid in argvs:
            kind = _kind(pid, argvs, parents)
            if kind is not None:
                found[kind].append(pid)
        return found

    def owner(self, pid: int, clients: int) -> str:
        """Return whose process it is: a client's, or the job's."""
        for client in range(clients):
            if pid in proc.job_processes(self.marker, proc.client_marker(client)):
                return f"client {client}"
        return "the job"

    def trace(self, client: int) -> List[Dict[str, Any]]:
        """Return what the leader of a client wrote down."""
        return _lines(self.folder / f"client{client}.trace")

    def generations(self) -> List[Dict[str, Any]]:
        """Return the hand-overs so far."""
        return _lines(self.folder / "job" / "state" / "generations.jsonl")


def _lines(path: Path) -> List[Dict[str, Any]]:
    """What was written; the last line may be half of one."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _kind(pid: int, argvs: Dict[int, List[str]], parents: Dict[int, int]) -> Optional[str]:
    argv = argvs[pid]
    above = argvs.get(parents[pid], [])
    if ZYGOTE in argv:
        # What a zygote has forked has its command line, outlives it, and is then its parent's.
        role = _role(pid)
        is_zygote = ZYGOTE not in above and (STATION in above or str(WORKER) in above)
        return role or ("zygote" if is_zygote else "agent")
    if STATION in argv and STATION not in above:
        return "station"
    if str(WORKER) in argv and RANK not in argv and RANK in above:
        return "rank"
    return None


def _role(pid: int) -> Optional[str]:
    """Scheduler and servers have logs of their own as standard output."""
    try:
        log = os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:
        return None
    return next((kind for kind in ("scheduler", "server") if log.startswith(kind)), None)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def recovery(job: Job, clients: int, since: float, changes: bool) -> Optional[Dict[str, Any]]:
    """How the job has recovered from a kill at `since`; None: not yet.

    It has when every client has exchanged in a generation that began after it, or, where a
    kill `changes` no generation, when every client has exchanged again.
    """
    begun = [g for g in job.generations() if g["time"] > since]
    if changes and not begun:
        return None
    start = begun[-1]["time"] if changes else since
    firsts = []
    for client in range(clients):
        trace = job.trace(client)
        done = [line["time"] for line in trace if line["exchanged"] and line["time"] > start]
        if not done:
            return None
        firsts.append(done[0])
    after = [line for c in range(clients) for line in job.trace(c) if line["time"] > since]
    return {
        "seconds": round(max(firsts) - since, 2),
        "generations": len(begun),
        "exchanges_lost": sum(line["lost"] for line in after),
        "slowest_step_s": round(max(line["slowest_s"] for line in after), 3),
    }


def disturb(job: Job, args: argparse.Namespace) -> List[Dict[str, Any]]:
    """Make all kills, each when the job has recovered from the one before."""
    chance, kills = random.Random(args.seed), []
    _wait(job, args.limit, lambda: recovery(job, args.clients, 0.0, True))
    kinds = [args.kinds[i % len(args.kinds)] for i in range(args.kills)]
    chance.shuffle(kinds)
    for kind in kinds:
        time.sleep(chance.uniform(0.2, 1.5))
        victims = _wait(job, args.limit, lambda kind=kind: job.processes()[kind])
        pid = chance.choice(sorted(victims))
        of, since = job.owner(pid, args.clients), time.time()
        os.kill(pid, signal.SIGKILL)
        found = _wait(
            job,
            args.limit,
            lambda: recovery(job, args.clients, since, kind != "zygote"),  # noqa: B023
        )
        kills.append({"kind": kind, "of": of, **found})
        print(_row(kills[-1]), flush=True)
    return kills


def _row(kill: Dict[str, Any]) -> str:
    who = f"{kill['kind']} of {kill['of']}"
    lost, slowest = kill["exchanges_lost"], kill["slowest_step_s"]
    return f"{who:22}{kill['seconds']:6.2f} s, {lost} exchanges lost, slowest step {slowest:.3f} s"


def by_kind(kills: Sequence[Dict[str, Any]]) -> Dict[str, Dict[str, Any]]:
    """Return, for each kind of process, what its kills cost."""
    found = {}
    for kind in KINDS:
        made = [kill for kill in kills if kill["kind"] == kind]
        if made:
            seconds = [kill["seconds"] for kill in made]
            found[kind] = {
                "kills": len(made),
                "seconds_median": round(statistics.median(seconds), 2),
                "seconds_most": max(seconds),
                "exchanges_lost": sum(kill["exchanges_lost"] for kill in made),
                "slowest_step_s": max(kill["slowest_step_s"] for kill in made),
            }
    return found


def _wait(job: Job, limit_s: float, done: Any) -> Any:
    end = time.monotonic() + limit_s
    while True:
        found = done()
        if found:
            return found
        if job.process.poll() is not None:
            raise SystemExit(f"the job ended with {job.process.returncode}:\n{_tail(job)}")
        if time.monotonic() > end:
            raise SystemExit(f"nothing after {limit_s:g} s:\n{_tail(job)}")
        time.sleep(LOOK_S)


def _tail(job: Job) -> str:
    return (job.folder / "output").read_text(errors="replace")[-6000:]


def _segments() -> Set[str]:
    """Files in shared memory; other jobs may use some meanwhile."""
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


def run(args: argparse.Namespace, kills: bool) -> Dict[str, Any]:
    """Run the job once; return losses of the center, slowest steps, kills, what was left."""
    before = _segments()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        job = Job(args, Path(name))
        try:
            made = disturb(job, args) if kills else []
            job.enough.touch()
            code = job.process.wait(args.limit + 10 * args.epochs)
        finally:
            job.process.kill()
            job.output.close()
        if code:
            raise SystemExit(f"the job ended with {code}:\n{_tail(job)}")
        ends = [_lines(job.folder / f"client{c}.end")[-1] for c in range(args.clients)]
        slow = [line["slowest_s"] for c in range(args.clients) for line in job.trace(c)]
        left = list(proc.job_processes(job.marker))
    return {
        "losses": [end["loss"] for end in ends],
        "steps": [end["step"] for end in ends],
        "slowest_step_s": max(slow),
        "kills": made,
        "by_kind": by_kind(made),
        "processes_left": len(left),
        "shared_memory_left": sorted(_segments() - before - proc.files_in_use()),
    }


def main() -> None:
    """Run both, print the table, write the file."""
    args = arguments()
    quiet, disturbed = run(args, kills=False), run(args, kills=True)
    gap = max(abs(a / b - 1) for a, b in zip(disturbed["losses"], quiet["losses"]))
    print(f"loss: {gap:.2%} from that of the undisturbed run")
    print(f"slowest step: {disturbed['slowest_step_s']:.3f} s ({quiet['slowest_step_s']:.3f} s)")
    result = {"loss_gap": gap, "undisturbed": quiet, "disturbed": disturbed}
    if args.output is not None:
        write(args.output, {**describe(), **result})


if __name__ == "__main__":
    main()
