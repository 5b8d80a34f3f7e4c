"""What the ranks of a job reported in its folder, and who failed first."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from .proc import signal_name

__all__ = [
    "Failure",
    "ended",
    "exit_code",
    "first_failed_rank",
    "keep_end",
    "missing_ranks",
    "set_aside",
    "tail",
]

_TAIL_LINES = 10
_TAIL_BYTES = 16384


@dataclass(frozen=True)
class Failure:
    """Why a job ends: who, how, when, and where to read more.

    Attributes
    ----------
    who : str
        "client 1 rank 0 (pid 12 on alpha)".
    how : str
        "failed: exit code 3", "failed: SIGKILL", "was ended by Ctrl-C".
    code : int
        What the launcher exits with.
    time : float
        When, in seconds since the epoch.
    log : str, optional
        File with its output.
    """

    who: str
    how: str
    code: int
    time: float
    log: Optional[str] = None

    def text(self) -> str:
        """Return the line that names the failure, with the end of its log."""
        line = f"gluon-esgd: {self.who} {self.how}"
        if self.log is None:
            return line
        lines = tail(self.log)
        shown = "".join(f"\n  | {text}" for text in lines)
        return f"{line}; log: {self.log}{shown}"


def tail(path: str, count: int = _TAIL_LINES) -> List[str]:
    """Return the last lines of a log, as a terminal would show them."""
    try:
        with open(path, "rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n") if line][-count:]


def exit_code(returncode: int) -> Tuple[int, str]:
    """Return what to exit with for a child's return code (-N: signal N), and its words."""
    if returncode < 0:
        return 128 - returncode, f"failed: {signal_name(-returncode)}"
    return returncode or 1, f"failed: exit code {returncode}"


def _records(job_dir: str, kind: str) -> Dict[Tuple[int, int], Dict[str, object]]:
    found = {}
    for path in Path(job_dir, "state").glob(f"*.{kind}"):
        match = re.fullmatch(r"client(\d+)\.rank(\d+)", path.stem)
        record = _record(path) if match else None
        if match and record is not None:
            found[int(match[1]), int(match[2])] = record
    return found


def missing_ranks(job_dir: str, clients: Sequence[int], size: int) -> List[Tuple[int, int]]:
    """Return (client, rank) of the ranks of `clients` that have not reported their start."""
    there = {**_records(job_dir, "start"), **_records(job_dir, "exit")}
    return [(k, r) for k in clients for r in range(size) if (k, r) not in there]


def first_failed_rank(job_dir: str, clients: Optional[Sequence[int]] = None) -> Optional[Failure]:
    """Return the failure that came first among the ranks, of `clients` only if given."""
    failures = [
        _failure(job_dir, *who, record)
        for who, record in _records(job_dir, "exit").items()
        if record.get("returncode") != 0 and (clients is None or who[0] in clients)
    ]
    return min(failures, key=lambda failure: failure.time) if failures else None


def set_aside(job_dir: str, clients: Sequence[int], life: int) -> None:
    """Move what ranks of `clients` reported in a life to a folder of its own."""
    state = Path(job_dir, "state")
    folder = state / f"life{life}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for client in clients:
        for path in state.glob(f"client{client}.rank*"):
            path.replace(folder / path.name)


def keep_end(job_dir: str, failure: Optional[Failure]) -> None:
    """Write down how the job has ended, for `ended`; what is in the way of that is no fault."""
    how = "without a failure" if failure is None else f"{failure.who} {failure.how}"
    with contextlib.suppress(OSError):
        _end(job_dir).write_text(json.dumps({"time": time.time(), "how": how}))


def ended(job_dir: str) -> str:
    """Return how the last job in a folder has ended, as the end of a sentence, or nothing."""
    try:
        record = json.loads(_end(job_dir).read_text())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
        return f"; the last one ended at {when}: {record['how']:.300}"
    except FileNotFoundError:
        is_one = _end(job_dir).parent.is_dir()
        return "; its launcher was killed, or is just ending" if is_one else ""
    except (OSError, OverflowError, RecursionError, TypeError, ValueError, KeyError):
        return ""


def _end(job_dir: str) -> Path:
    return Path(job_dir, "state", "end.json")


def _failure(job_dir: str, client: int, rank: int, record: Dict[str, object]) -> Failure:
    name = record.get("signal")
    code = 128 + _number(str(name)) if name else int(str(record.get("returncode", 1)))
    how = f"failed: {name}" if name else f"failed: exit code {code}"
    who = f"client {client} rank {rank} (pid {record['pid']} on {record['host']})"
    log = f"{job_dir}/logs/client{client}.rank{rank}.log"
    return Failure(who, how, code, float(str(record["time"])), log)


def _number(name: str) -> int:
    if name in signal.Signals.__members__:
        return int(signal.Signals[name])
    return int(name.rpartition(" ")[2])  # "signal 40": a real-time signal has no name


def _record(path: Path) -> Optional[Dict[str, object]]:
    """What a rank has reported; None where a file holds something else."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    name, code = record.get("signal"), record.get("returncode")
    known = name in signal.Signals.__members__ if isinstance(name, str) else name is None
    numbered = isinstance(name, str) and re.fullmatch(r"signal [0-9]{1,2}", name)
    exited = code is None or (type(code) is int and 0 <= code < 256)
    when = record.get("time")
    dated = isinstance(when, (int, float)) and abs(when) < 1e12
    whole = dated and exited and isinstance(record.get("host"), str) and "pid" in record
    return record if whole and (known or numbered) else None
