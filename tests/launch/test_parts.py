"""Parts of the launcher by themselves: relay, guard, terminal, reports, shared memory."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time

import pytest

from gluon_esgd.launch import mpi, proc, state
from gluon_esgd.launch.rank import rank_of
from gluon_esgd.launch.terminal import Terminal

from ..pool import until

READY = "import signal, time\nprint('ready', flush=True)\n"
IGNORING = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]\n"


@pytest.fixture
def marker(tmp_path):
    """Marks processes of this test; none may be left."""
    mark = proc.marker(str(tmp_path))
    yield mark
    left = proc.job_processes(mark)
    proc.kill_job(mark)
    assert not left


@pytest.fixture
def relay(marker):
    """Start relays; returns them with the child ready."""
    made = []

    def begin(code, *flags):
        argv = [sys.executable, "-m", "gluon_esgd.launch.relay", *flags, "--"]
        name, value = marker.split("=", 1)
        popen = subprocess.Popen(
            [*argv, sys.executable, "-c", code],
            env={**os.environ, name: value},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        made.append(popen)
        assert popen.stdout.readline() == b"ready\n"
        return popen

    yield begin
    for popen in made:
        popen.wait(20)
        popen.stdin.close()
        popen.stdout.close()


def test_a_relay_ends_what_its_command_left(relay, marker):
    sleeper = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    assert relay(sleeper + READY).wait(10) == 0
    assert not proc.job_processes(marker)


@pytest.mark.parametrize("code", [0, 3, 255])
def test_a_relay_passes_the_exit_code_on(relay, code):
    assert relay(READY + f"raise SystemExit({code})").wait(10) == code


def test_a_relay_tells_a_signal_as_a_shell_does(relay):
    assert relay(READY + "import os; os.kill(os.getpid(), 9)").wait(10) == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_relay_forwards_signals(relay, number):
    popen = relay(f"{READY}signal.signal({number:d}, lambda *_: exit(7)); time.sleep(600)")
    deadline = time.monotonic() + 10  # the handler may come after the first line
    while popen.poll() is None and time.monotonic() < deadline:
        popen.send_signal(number)
        time.sleep(0.1)
    assert popen.wait(1) in (7, 128 + number)


def test_a_relay_kills_who_ignores_it(relay):
    popen = relay(IGNORING + READY + "time.sleep(600)")
    began = time.monotonic()
    popen.terminate()
    assert popen.wait(10) == 128 + signal.SIGKILL
    assert 1 < time.monotonic() - began < 5


def test_the_control_channel_terminates_in_peace(relay):
    asked = relay(
        READY + "signal.signal(15, lambda *_: exit(7))\nprint('set')\ntime.sleep(9)", "--control"
    )
    asked.stdin.write(b"t")
    asked.stdin.flush()
    assert asked.wait(10) in (7, 128 + signal.SIGTERM)


def test_the_control_channel_interrupts_and_its_end_terminates(relay):
    interrupted = relay(READY + "time.sleep(600)", "--control")
    interrupted.stdin.write(b"c")
    interrupted.stdin.flush()
    assert interrupted.wait(10) == 128 + signal.SIGINT
    cut_off = relay(READY + "time.sleep(600)", "--control")
    cut_off.stdin.close()
    assert cut_off.wait(10) == 128 + signal.SIGTERM


PARENT = """
import subprocess, sys
command = [sys.executable, "-c", sys.argv[1]]
relay = [sys.executable, "-m", "gluon_esgd.launch.relay", "--", *command]
subprocess.Popen(relay, stdout=subprocess.PIPE).stdout.readline()
"""


def test_a_relay_dies_with_its_parent(marker):
    name, value = marker.split("=", 1)
    parent = [sys.executable, "-c", PARENT, READY + "time.sleep(600)"]
    subprocess.run(parent, env={**os.environ, name: value}, check=True, timeout=20)
    until(lambda: not proc.job_processes(marker), 10.0)


GRACEFUL = """
import subprocess, sys
code = "from gluon_esgd.launch import proc, relay; proc.die_with_parent(15); import os, sys; " \\
    "r = relay.Relay(sys.argv[1:], lambda b: os.write(1, b), grace_s=600.0); r.start(); r.wait()"
command = [sys.executable, "-c", code, sys.executable, "-c", sys.argv[1]]
subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline()
"""


def test_a_relay_that_lost_its_parent_gives_no_grace(marker):
    name, value = marker.split("=", 1)
    parent = [sys.executable, "-c", GRACEFUL, IGNORING + READY + "time.sleep(600)"]
    subprocess.run(parent, env={**os.environ, name: value}, check=True, timeout=20)
    limit = time.monotonic() + 20
    while proc.job_processes(marker) and time.monotonic() < limit:
        time.sleep(0.05)


@pytest.mark.parametrize(("farewell", "survives"), [(b".", True), (b"", False)])
def test_the_guard_ends_a_job_whose_launcher_said_no_farewell(marker, farewell, survives):
    name, value = marker.split("=", 1)
    job = subprocess.Popen(["sleep", "600"], env={name: value}, start_new_session=True)
    try:
        guard = [sys.executable, "-m", "gluon_esgd.launch.guard", marker, repr(time.time())]
        assert subprocess.run(guard, input=farewell, timeout=20).returncode == 0
        assert (job.poll() is None) is survives
    finally:
        job.kill()
        job.wait()


def test_only_unused_new_files_of_mpi_are_removed(tmp_path):
    names = ("mpich_shm_1", "ucx_shm_posix_2", "sm_segment.h.0", "mpich_shm_used", "other")
    for name in (*names, "mpich_shm_old"):
        (tmp_path / name).write_bytes(b"x" * mmap.PAGESIZE)
    os.utime(tmp_path / "mpich_shm_old", (1, 1))
    with open(tmp_path / "mpich_shm_used", "r+b") as used:
        mapped = mmap.mmap(used.fileno(), 0)
    removed = proc.clean_shared_memory(time.time() - 60, str(tmp_path))
    mapped.close()
    assert sorted(os.path.basename(path) for path in removed) == sorted(names[:3])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"mpich_shm_used", "mpich_shm_old", "other"}


def test_a_terminal_that_nobody_reads_blocks_nobody():
    reading, writing = os.pipe()
    terminal = Terminal(writing)
    text = b"0123456789abcdef" * 65536
    terminal.write(text)
    assert terminal.pending
    got = b""
    while len(got) < len(text):
        got += os.read(reading, 65536)
        terminal.flush(0)
    assert got == text and not terminal.pending
    os.close(reading)
    terminal.write(b"gone")  # SIGPIPE is ignored by Python: the text is dropped
    assert not terminal.pending
    os.close(writing)


def _exit(folder, client, rank, at, **end):
    (folder / "state").mkdir(exist_ok=True)
    record = {"pid": 7, "host": "h", "time": at, **end}
    (folder / "state" / f"client{client}.rank{rank}.exit").write_text(json.dumps(record))


def test_the_first_failure_is_the_earliest_not_the_lowest_rank(tmp_path):
    _exit(tmp_path, 0, 0, 30.0, signal="SIGKILL")
    _exit(tmp_path, 0, 1, 5.0, returncode=0)
    _exit(tmp_path, 1, 0, 20.0, returncode=3)
    _exit(tmp_path, 1, 1, 25.0, signal="signal 40")
    failure = state.first_failed_rank(str(tmp_path))
    assert (failure.who, failure.code) == ("client 1 rank 0 (pid 7 on h)", 3)
    _exit(tmp_path, 1, 1, 10.0, signal="signal 40")
    assert state.first_failed_rank(str(tmp_path)).code == 168


def test_missing_ranks_are_those_without_a_report(tmp_path):
    _exit(tmp_path, 0, 1, 1.0, returncode=0)
    assert state.missing_ranks(str(tmp_path), range(2), 2) == [(0, 0), (1, 0), (1, 1)]
    assert state.missing_ranks(str(tmp_path), [1], 2) == [(1, 0), (1, 1)]


def test_what_ranks_reported_in_an_earlier_life_counts_no_more(tmp_path):
    _exit(tmp_path, 0, 0, 20.0, returncode=3)
    _exit(tmp_path, 1, 0, 10.0, returncode=4)
    assert state.first_failed_rank(str(tmp_path), [0]).code == 3
    state.set_aside(str(tmp_path), [1], 0)
    assert state.first_failed_rank(str(tmp_path)).code == 3
    assert (tmp_path / "state" / "life0" / "client1.rank0.exit").exists()


def test_the_end_of_a_log_is_what_a_terminal_shows(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % k for k in range(5000)) + b"1%\r2%\rdone\n\nlast")
    assert state.tail(str(log), 3) == ["line 4999", "done", "last"]
    assert state.tail(str(tmp_path / "none")) == []


@pytest.mark.parametrize("name", ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"])
def test_the_rank_is_what_mpiexec_announced(name):
    assert (rank_of({name: "3"}), rank_of({})) == (3, 0)


@pytest.mark.parametrize(
    ("text", "vendor", "version"),
    [
        ("HYDRA build details:\n    Version:      5.0.2\n", "mpich", "5.0.2"),
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs", "openmpi", "5.0.11"),
        ("mpiexec (OpenRTE) 4.1.4\n", "openmpi", "4.1.4"),
    ],
)
def test_vendors_are_known_by_their_version_output(tmp_path, text, vendor, version):
    fake = tmp_path / "mpiexec"
    fake.write_text(f"#!/bin/sh\ncat <<'E'\n{text}E\n")
    fake.chmod(0o755)
    assert mpi.find(str(fake)) == mpi.Mpi(str(fake), vendor, version)
