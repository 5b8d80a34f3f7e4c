"""Linux processes: die with the parent, find what is left of a job, clean shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Set

from ..settings import PREFIX

__all__ = [
    "adopt_orphans",
    "clean_shared_memory",
    "client_marker",
    "descendants",
    "die_with_parent",
    "environment",
    "files_in_use",
    "job_processes",
    "kill_job",
    "marker",
    "signal_name",
    "signal_quietly",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# What MPICH, its UCX, and Open MPI name their files; a rank ended by SIGKILL leaves them.
_SHARED = re.compile(r"(gluon_esgd_|mpich_shm_|ucx_shm_posix_|sm_segment\.|vader_segment\.)")

_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: not safe between fork and exec


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ended, so that they can be ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _pids() -> List[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat_fields(pid: int) -> List[str]:
    """State, parent, ... of a process: what follows the name, which may hold spaces."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def descendants(root: int) -> List[int]:
    """Return the living descendants of process `root`."""
    children: Dict[int, List[int]] = {}
    for pid in _pids():
        stat = _stat_fields(pid)
        if stat:
            children.setdefault(int(stat[1]), []).append(pid)
    found, queue = [], list(children.get(root, []))
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue.extend(children.get(pid, []))
    return [pid for pid in found if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    return _stat_fields(pid)[:1] not in ([], ["Z"])


def marker(job_dir: str) -> str:
    """Return the NAME=VALUE that is in the environment of every process of a job."""
    return f"{PREFIX}JOB_DIR={job_dir}"


def client_marker(client: int) -> str:
    """Return the NAME=VALUE that is in the environment of every process of a client."""
    return f"{PREFIX}CLIENT={client}"


def job_processes(*markers: str) -> Dict[int, List[str]]:
    """Return pid -> argv of the living processes whose start environment has all `markers`."""
    wanted, out = {marker.encode() for marker in markers}, {}
    for pid in _pids():
        started = set(_read(pid, "environ").split(b"\0"))
        if pid != os.getpid() and wanted <= started and _is_alive(pid):
            out[pid] = _read(pid, "cmdline").decode("utf-8", "replace").split("\0")[:-1]
    return out


def environment(pid: int) -> Dict[str, str]:
    """Return the environment with which a process was started; empty if it is gone."""
    entries = _read(pid, "environ").decode("utf-8", "surrogateescape").split("\0")
    pairs = (entry.partition("=") for entry in entries)
    return {name: value for name, equals, value in pairs if equals}


def kill_job(*markers: str, limit_s: float = 3.0) -> None:
    """Kill the processes that `markers` mark, and wait at most `limit_s` until they are gone."""
    limit = time.monotonic() + limit_s
    left = job_processes(*markers)
    while left and time.monotonic() < limit:
        for pid in left:
            signal_quietly(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = job_processes(*markers)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def signal_quietly(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_name(number: int) -> str:
    """Return the name of a signal, as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def clean_shared_memory(since: float, folder: str = "/dev/shm") -> List[str]:
    """Remove what ended MPI ranks left in shared memory; return the names.

    Only files of this user, named as MPI libraries name theirs, made after the
    time `since`, and that no living process has mapped or open.
    """
    old = [path for path in _own_segments(folder) if _made_after(path, since)]
    used = files_in_use() if old else set()
    return [path for path in old if path not in used and _remove(path)]


def _own_segments(folder: str) -> List[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names if _SHARED.match(name)]


def _made_after(path: str, since: float) -> bool:
    try:
        stat = os.stat(path)
    except OSError:
        return False
    return stat.st_uid == os.getuid() and stat.st_mtime >= since


def files_in_use() -> Set[str]:
    """Return the paths that living processes have open or mapped, as far as we may see."""
    return {path for pid in _pids() for path in _files_of(pid)}


def _files_of(pid: int) -> Iterator[str]:
    """Open files, then maps: who maps a file and closes it meanwhile is seen in one of them."""
    yield from _open_files(pid)
    for line in _read(pid, "maps").decode("utf-8", "replace").splitlines():
        yield line.partition("/")[1] + line.partition("/")[2]


def _open_files(pid: int) -> Iterator[str]:
    try:
        handles = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    targets = (_link(f"/proc/{pid}/fd/{handle}") for handle in handles)
    yield from (target for target in targets if target is not None)


def _link(path: str) -> Optional[str]:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
