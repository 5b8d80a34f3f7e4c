"""Real jobs of small scripts: whatever happens, the launcher ends all and says why."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from .conftest import LIMIT_S

WHO = """
import os, sys
client, names = os.environ.get("GLUON_ESGD_CLIENT", "0"), ("PMI_RANK", "PMIX_RANK")
rank = next((os.environ[n] for n in names if n in os.environ), "0")
"""
WAIT = WHO + "print('ready', client, rank); import time; time.sleep(600)"
FAIL = WHO + "(client, rank) == ('1', '1') and sys.exit(3); import time; time.sleep(600)"
STUBBORN = (
    "import signal, subprocess, time\n"
    "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
    "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "print('ready'); time.sleep(600)"
)
TWO_BY_TWO = ("-n", 4, "--clients", 2)


def py(code, python=sys.executable):
    return [python, "-c", code]


def signalled(jobs, number):
    """Send a signal to the launchers of jobs that then end side by side."""
    for job in jobs:
        job.signalled = time.monotonic()
        job.popen.send_signal(number)


def finishes(job):
    """Return the exit code of a job that must end in time after its signal."""
    code, _ = job.finish()
    assert time.monotonic() - job.signalled < LIMIT_S
    return code


@pytest.mark.mpi
def test_two_clients_of_two_ranks_under_each_mpi(start, vendor):
    mpi, python = vendor
    code = WHO + (
        "from mpi4py import MPI\n"
        "print('sum', MPI.COMM_WORLD.allreduce(1), 'client', client, 'rank', MPI.COMM_WORLD.rank)"
    )
    job = start([*TWO_BY_TWO, "--mpiexec", mpi.mpiexec], py(code, python))
    assert job.finish()[0] == 0, job.err
    lines = sorted(line for line in job.out.decode().splitlines() if "sum" in line)
    says = [f"sum 2 client {k} rank {r}" for k in range(2) for r in range(2)]
    marks = ["", *(f"[client {k} rank {r}] " for k, r in ((0, 1), (1, 0), (1, 1)))]
    assert lines == sorted(mark + text for mark, text in zip(marks, says))
    logs = {path.name for path in Path(job.dir, "logs").glob("*.rank*.log")}
    assert logs == {f"client{k}.rank{r}.log" for k in range(2) for r in range(2)}
    assert all(job.state(f"client{k}.rank{r}.exit")["returncode"] == 0 for k, r in ((0, 0), (1, 1)))


@pytest.mark.mpi
def test_a_failing_rank_ends_the_job_with_its_code(start, vendor):
    job = start([*TWO_BY_TWO, "--mpiexec", vendor[0].mpiexec], py(FAIL))
    code, took = job.finish()
    assert code == 3
    assert took < LIMIT_S + 5  # which includes the start
    last = job.err.decode()
    pid = job.state("client1.rank1.exit")["pid"]
    assert f"client 1 rank 1 (pid {pid} on {socket.gethostname()}) failed: exit code 3" in last
    assert f"log: {job.dir}/logs/client1.rank1.log" in last


@pytest.mark.mpi
def test_a_killed_rank_is_named_with_its_signal_and_last_words(start, vendor):
    job = start([*TWO_BY_TWO, "--mpiexec", vendor[0].mpiexec], py(WAIT))
    job.wait_for("ready", 4)
    os.kill(job.state("client0.rank1.start")["pid"], signal.SIGKILL)
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (137, True)
    assert "client 0 rank 1" in job.err.decode()
    assert "failed: SIGKILL" in job.err.decode()
    assert "  | ready 0 1" in job.err.decode()


SPLIT = """
from gluon_esgd import world
w = world()
said = w.leaders.allgather(w.worker_rank, "a test") if w.leaders is not None else None
print("place", w.client, w.rank, w.size, said)
"""


@pytest.mark.mpi
def test_clients_of_one_mpi_job_under_each_mpi(start, vendor):
    mpi, python = vendor
    job = start([*TWO_BY_TWO, "--servers", 0, "--mpiexec", mpi.mpiexec], py(SPLIT, python))
    assert job.finish()[0] == 0, job.err
    lines = sorted(line for line in job.out.decode().splitlines() if "place" in line)
    assert lines == [
        "[client 0 rank 1] place 0 1 2 None",
        "[client 1 rank 0] place 1 0 2 [0, 2]",
        "[client 1 rank 1] place 1 1 2 None",
        "place 0 0 2 [0, 2]",
    ]
    logs = {path.name for path in Path(job.dir, "logs").iterdir()}
    assert logs == {"client0.log", *(f"client{k}.rank{r}.log" for k in (0, 1) for r in (0, 1))}
    assert job.state("client1.rank1.exit")["returncode"] == 0


@pytest.mark.mpi
def test_a_killed_rank_of_a_split_job_is_named_by_client(start, vendor):
    code = SPLIT + "import os; print('ready', os.getpid()); import time; time.sleep(600)"
    job = start([*TWO_BY_TWO, "--servers", 0, "--mpiexec", vendor[0].mpiexec], py(code, vendor[1]))
    job.wait_for("ready", 4)
    os.kill(job.state("client1.rank0.start")["pid"], signal.SIGKILL)
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (137, True)
    assert "client 1 rank 0 (pid" in job.err.decode() and "failed: SIGKILL" in job.err.decode()
    assert f"log: {job.dir}/logs/client1.rank0.log" in job.err.decode()


@pytest.mark.mpi
def test_a_rank_killed_inside_mpi_leaves_no_shared_memory(start, vendor):
    mpi, python = vendor
    code = (
        "from mpi4py import MPI; import os, time\n"
        "MPI.COMM_WORLD.allreduce(1)\n"
        "MPI.COMM_WORLD.rank == 1 and os.kill(os.getpid(), 9); time.sleep(600)"
    )
    job = start(["-n", 2, "--mpiexec", mpi.mpiexec], py(code, python))
    assert job.finish()[0] == 137
    assert "client 0 rank 1" in job.err.decode()


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_being_asked_to_end_reaches_the_ranks_first(start, vendor, number):
    code = (
        "import time\ntry:\n    print('ready'); time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('saved')"
    )
    job = start(["-n", 2, "--mpiexec", vendor[0].mpiexec], py(code))
    job.wait_for("ready", 2)
    job.popen.send_signal(number)
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (128 + number, True)
    assert job.out.decode().count("saved") == 2


SAVES = """
import signal, sys, time
def save(*_):
    print('saves'); time.sleep(float(sys.argv[1])); print('saved'); sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, lambda *_: print('interrupted'))
print('ready'); time.sleep(600)
"""


@pytest.mark.mpi
def test_sigterm_gives_ranks_a_grace_to_save_in(start, vendors):
    arguments, command = ["-n", 2, "--grace", 60], [*py(SAVES), "3.0"]
    jobs = [start([*arguments, "--mpiexec", mpi.mpiexec], command) for mpi, _ in vendors]
    for job in jobs:
        job.wait_for("ready", 2)
    signalled(jobs, signal.SIGTERM)
    for job in jobs:
        assert finishes(job) == 143
        assert job.out.decode().count("saved") == 2 and "interrupted" not in job.out.decode()
        assert "SIGTERM: ending the job within 60 s" in job.err.decode()


def test_after_the_grace_ranks_are_interrupted_and_ended(start):
    job = start(["-n", 1, "--grace", 0.5], [*py(SAVES), "600"])
    job.wait_for("ready")
    job.popen.terminate()
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (143, True)
    assert job.out.split() == [b"ready", b"saves", b"interrupted", b"saves"]  # then terminated


def test_a_second_signal_in_the_grace_kills_at_once(start):
    job = start(["-n", 1, "--grace", 600], [*py(SAVES), "600"])
    job.wait_for("ready")
    job.popen.terminate()
    job.wait_for("saves")
    job.popen.terminate()
    code, took = job.finish()
    assert (code, took < 2.5) == (143, True)


def test_the_grace_ends_with_the_launcher(start):
    job = start(["-n", 1, "--grace", 600], [*py(SAVES), "600"])
    job.wait_for("ready")
    job.popen.kill()
    assert job.wait_until_empty() < LIMIT_S


def stubborn(start, vendors):
    """Jobs of each vendor whose ranks are ready and ignore signals."""
    jobs = [start([*TWO_BY_TWO, "--mpiexec", mpi.mpiexec], py(STUBBORN)) for mpi, _ in vendors]
    for job in jobs:
        job.wait_for("ready", 4)
    return jobs


@pytest.mark.mpi
def test_ctrl_c_ends_even_those_who_ignore_it(start, vendors):
    jobs = stubborn(start, vendors)
    signalled(jobs, signal.SIGINT)
    for job in jobs:
        assert finishes(job) == 130
        assert "ended by Ctrl-C" in job.err.decode()


@pytest.mark.mpi
def test_a_second_ctrl_c_kills_at_once(start):
    job = start(["-n", 2], py(STUBBORN))
    job.wait_for("ready", 2)
    job.popen.send_signal(signal.SIGINT)
    job.wait_for("once more kills it", 1)
    job.popen.send_signal(signal.SIGINT)
    code, took = job.finish()
    assert (code, took < 2.5) == (130, True)


@pytest.mark.mpi
def test_nothing_survives_a_killed_launcher(start, vendors):
    jobs = stubborn(start, vendors)
    signalled(jobs, signal.SIGKILL)
    for job in jobs:
        job.wait_until_empty()
        assert time.monotonic() - job.signalled < LIMIT_S


def test_what_is_left_of_a_killed_rank_wrapper_is_swept_up(start):
    job = start(["-n", 1], py(STUBBORN))
    job.wait_for("ready", 1)
    (pid,) = (p for p, argv in job.processes().items() if "gluon_esgd.launch.rank" in argv)
    os.kill(pid, signal.SIGKILL)
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (137, True)
    assert "client 0 (pid" in job.err.decode()


def test_one_local_rank_needs_no_mpi(start):
    job = start(["-n", 1], py(WHO + "print(sorted(n for n in os.environ if 'PMI' in n))"))
    assert job.finish()[0] == 0
    assert job.out == b"[]\n"


def test_the_leader_comes_through_raw_as_it_is_written(start):
    job = start(
        ["-n", 1], py("import sys; sys.stdout.write('1%\\r2%\\r'); sys.stderr.write('end')")
    )
    assert job.finish()[0] == 0
    assert job.out == b"1%\r2%\rend"
    assert Path(job.dir, "logs", "client0.rank0.log").read_bytes() == b"1%\r2%\rend"


def test_children_see_none_of_the_parameter_servers_variables(start):
    code = "import os; print(sorted(n for n in os.environ if n[:4] in ('DMLC', 'PS_A', 'PORT')))"
    job = start(["-n", 1], py(code), DMLC_ROLE="worker", PS_A="1", PORT="80")
    assert job.finish()[0] == 0
    assert job.out == b"[]\n"


def test_what_a_rank_leaves_running_is_ended_with_it(start):
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    job = start(["-n", 1], py(code))
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (0, True)


HALF_AN_MPI = """#!/bin/sh
[ "$1" = --version ] && { echo "HYDRA build details: Version: 5"; exit; }
while [ "$1" != 127.0.0.1 ]; do shift; done
shift
PMI_RANK=0 exec "$@"
"""


def test_who_has_not_started_in_time_is_named(start, tmp_path):
    half = tmp_path / "mpiexec"  # starts rank 0 only
    half.write_text(HALF_AN_MPI)
    half.chmod(0o755)
    job = start(["-n", 3, "--start-timeout", 2, "--mpiexec", half], py(WAIT))
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (1, True)
    says = "client 0 rank 1, client 0 rank 2 failed: not started within 2 s"
    assert says in job.err.decode()


def test_who_of_a_split_job_has_not_started_is_named_by_client(start, tmp_path):
    half = tmp_path / "mpiexec"
    half.write_text(HALF_AN_MPI)
    half.chmod(0o755)
    split = [*TWO_BY_TWO, "--servers", 0, "--start-timeout", 2, "--mpiexec", half]
    job = start(split, py(WAIT))
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (1, True)
    says = "client 0 rank 1, client 1 rank 0, client 1 rank 1 failed: not started within 2 s"
    assert says in job.err.decode()


def test_a_command_that_cannot_run_says_so(start, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/nowhere/python\n")
    broken.chmod(0o755)
    job = start(["-n", 1], [str(broken)])
    assert job.finish()[0] == 127
    assert "No such file" in job.err.decode()


def test_the_job_folder_is_private_and_keeps_former_logs(start):
    job = start(["-n", 1], py("print('first')"))
    assert job.finish()[0] == 0
    assert os.stat(job.dir).st_mode & 0o777 == 0o700
    again = start(["-n", 1, "--job-dir", job.dir], py("print('second')"))
    assert again.finish()[0] == 0
    assert Path(job.dir, "logs.1", "client0.rank0.log").read_text() == "first\n"
    assert Path(job.dir, "logs", "client0.rank0.log").read_text() == "second\n"


def test_checkpoints_move_aside_unless_they_are_resumed_from(start):
    job = start(["-n", 1], py("print('first')"))
    assert job.finish()[0] == 0
    kept = Path(job.dir, "checkpoints", "one")
    kept.parent.mkdir()
    kept.write_text("weights")
    again = start(["-n", 1, "--resume", job.dir], py("print('second')"))
    assert again.finish()[0] == 0, again.err
    assert kept.exists() and Path(job.dir, "logs", "client0.rank0.log").read_text() == "second\n"
    anew = start(["-n", 1, "--job-dir", job.dir], py("print('third')"))
    assert anew.finish()[0] == 0
    assert not kept.exists() and Path(job.dir, "checkpoints.1", "one").exists()
    none = start(["-n", 1, "--resume", job.dir + "x"], py("print('never')"))
    assert none.finish()[0] == 2
    assert f"--resume '{job.dir}x' is not a folder" in none.err.decode()


def test_a_folder_serves_one_job_at_a_time(start):
    job = start(["-n", 1], py(WAIT))
    job.wait_for("ready", 1)
    second = start(["-n", 1, "--job-dir", job.dir], py(WAIT))
    assert second.finish()[0] == 2
    assert f"a job is running in {job.dir}" in second.err.decode()
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130


@pytest.mark.mpi
def test_workers_get_cores_of_their_own_and_thread_caps(start):
    code = (
        "import os; print('cores', sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    )
    job = start(["-n", 2], py(code))
    assert job.finish()[0] == 0
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // 2)
    first, second = cores[:share], (cores[share : 2 * share] or cores[:1])
    says = [f"cores {first} {share}", f"[client 0 rank 1] cores {second} {share}"]
    assert sorted(job.out.decode().splitlines()) == sorted(says)


def test_binding_can_be_switched_off_and_the_users_caps_win(start):
    code = "import os; print(len(os.sched_getaffinity(0)), os.environ.get('OMP_NUM_THREADS'))"
    free = start(["-n", 1, "--bind", "none"], py(code))
    capped = start(["-n", 1], py(code), OMP_NUM_THREADS="7")
    count = len(os.sched_getaffinity(0))
    assert free.finish()[0] == capped.finish()[0] == 0
    assert free.out.decode() == f"{count} {os.environ.get('OMP_NUM_THREADS')}\n"
    assert capped.out.decode() == f"{count} 7\n"


@pytest.mark.mpi
def test_other_hosts_are_reached_by_the_remote_shell(start, vendor, remote):
    hosts = ["--hosts", "127.0.0.2:2,127.0.0.3:2", "--remote-shell", "fakesh", "--env", "A=b c"]
    code = WHO + "print('ready', client, rank, os.environ['A'], os.getcwd())"
    job = start([*TWO_BY_TWO, *hosts, "--mpiexec", vendor[0].mpiexec], py(code), **remote)
    assert job.finish()[0] == 0, job.err
    for client in range(2):
        for rank in range(2):
            assert f"ready {client} {rank} b c {os.getcwd()}" in job.out.decode()
    reached = sorted(Path(remote["SHELL_LOG"]).read_text().split())
    assert reached == ["127.0.0.2"] * 2 + ["127.0.0.3"] * 2  # a station and a client on each


def test_ctrl_c_and_sigterm_reach_a_rank_on_another_host(start, remote):
    hosts = ["--hosts", "127.0.0.2:1,127.0.0.3:1", "--remote-shell", "fakesh"]
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "try:\n    print('ready'); time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('saved')"
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        job = start(["-n", 2, "--clients", 2, *hosts], py(code), **remote)
        job.wait_for("ready", 2)
        job.popen.send_signal(number)
        code_, took = job.finish()
        assert (code_, took < LIMIT_S) == (128 + number, True)
        assert job.out.decode().count("saved") == 2


@pytest.mark.mpi
def test_signals_reach_ranks_of_an_mpi_job_on_other_hosts(start, vendor, remote):
    hosts = ["--hosts", f"{socket.gethostname()}:1,127.0.0.3:2", "--remote-shell", "fakesh"]
    job = start(
        ["-n", 3, *hosts, "--grace", 60, "--mpiexec", vendor[0].mpiexec],
        [*py(SAVES), "1"],
        **remote,
    )
    job.wait_for("ready", 3)
    job.popen.terminate()
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (143, True)
    said = job.out.decode()
    assert said.count("saves") == said.count("saved") == 3  # each once
    assert "interrupted" not in said


@pytest.mark.mpi
def test_without_a_grace_ranks_on_other_hosts_are_interrupted_first(start, vendor, remote):
    hosts = ["--hosts", "127.0.0.2:1,127.0.0.3:1", "--remote-shell", "fakesh"]
    code = (
        "import time\ntry:\n    print('ready'); time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('interrupted')"
    )
    job = start(["-n", 2, *hosts, "--mpiexec", vendor[0].mpiexec], py(code), **remote)
    job.wait_for("ready", 2)
    job.popen.send_signal(signal.SIGINT)
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (130, True)
    assert job.out.decode().count("interrupted") == 2


def test_other_hosts_notice_a_killed_launcher(start, remote):
    hosts = ["--hosts", "127.0.0.2:1,127.0.0.3:1", "--remote-shell", "fakesh"]
    job = start(["-n", 2, "--clients", 2, *hosts], py(WAIT), **remote)
    job.wait_for("ready", 2)
    job.popen.kill()
    assert job.wait_until_empty() < LIMIT_S
