"""Clients, servers and stations that fail in a running job: what the launcher makes of it.

Ranks are `fake_leader`, the station is `fake_station`, but for one test: no MXNet, no weights.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from gluon_esgd.launch.control import ask

from .conftest import LIMIT_S

TWO = ("-n", 2, "--clients", 2)


def leader(*behaviour):
    return [sys.executable, "-m", "tests.launch.fake_leader", *behaviour]


def generations(job):
    return [
        json.loads(line)
        for line in Path(job.dir, "state", "generations.jsonl").read_text().splitlines()
    ]


def test_a_failed_client_starts_again_and_the_others_go_on(start):
    job = start(TWO, leader("fail-once", "1"))
    assert job.finish()[0] == 0, job.err
    said = job.err.decode()
    pid = json.loads(Path(job.dir, "state", "life0", "client1.rank0.exit").read_text())["pid"]
    assert f"client 1 rank 0 (pid {pid} on " in said and "failed: exit code 3" in said
    assert f"log: {job.dir}/logs/client1.rank0.log" in said and "  | fails" in said
    assert "client 1 starts again at once (restart 1 of 3)" in said
    assert "generation 2: client 1 came back; center from client 0, " in said
    log = Path(job.dir, "logs", "client1.rank0.log").read_text().split("\n")
    first, second = ["life 0", "go 1 of 2", "filled False", "fails"], ["life 1", "go 2 of 2"]
    assert log[:7] == [*first, *second, "filled True"]  # it took the center and moved nothing
    assert "life 1" not in Path(job.dir, "logs", "client0.rank0.log").read_text()
    assert [(g["generation"], g["source"]) for g in generations(job)] == [(1, None), (2, 0)]
    assert job.state("client1.rank0.exit")["returncode"] == 0


def test_a_client_that_fails_before_it_took_part_fails_the_job(start):
    job = start(TWO, leader("early", "1"))
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (3, True)
    assert "starts again" not in job.err.decode()


def test_restarts_are_used_up(start):
    job = start([*TWO, "--max-restarts", 1], leader("fail", "1"))
    assert job.finish()[0] == 3
    said = job.err.decode()
    assert said.count("starts again") == 1 and "restart 1 of 1" in said
    assert said.rindex("client 1 rank 0") > said.index("starts again")


def test_a_place_may_stay_empty(start):
    job = start([*TWO, "--max-restarts", 0, "--min-clients", 1], leader("fail", "1"))
    job.wait_for("the place of client 1 stays empty; 1 of 2 clients go on")
    assert "go 2 of 1" in job.wait_for("go 2")  # alpha follows
    job.popen.terminate()
    assert job.finish()[0] == 143


def test_under_rule_sgd_all_start_again_where_that_was_asked_for(start):
    whole = start([*TWO, "--rule", "sgd", "--max-restarts", 1], leader("fail-once", "1", "sgd"))
    assert whole.finish()[0] == 0, whole.err
    assert "all clients start again at once (restart 1 of 1)" in whole.err.decode()
    logs = [Path(whole.dir, "logs", f"client{k}.rank0.log").read_text() for k in range(2)]
    assert all(re.search("life 0\n.*go 1 of 2\n.*life 1\ngo 2 of 2", log, re.S) for log in logs)
    alone = start([*TWO, "--rule", "sgd"], leader("fail-once", "1", "sgd"))
    assert alone.finish()[0] == 3


def test_a_job_without_servers_starts_again_where_that_was_asked_for(start):
    code = "import os; life = os.environ.get('GLUON_ESGD_LIFE'); print(life); exit(not life)"
    job = start(["-n", 1, "--max-restarts", 1], [sys.executable, "-c", code])
    assert job.finish()[0] == 0
    assert job.out == b"None\n1\n"


STUBBORN = """
import subprocess, sys, signal
sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("left", sleeper.pid, flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from tests.launch.fake_leader import main
main("stay")
"""


def test_nothing_of_an_earlier_life_is_left_when_the_next_begins(start):
    job = start(["-n", 1, "--servers", 1], [sys.executable, "-c", STUBBORN])
    left = int(job.wait_for("left").split()[-1])
    job.wait_for("filled")
    (wrapper,) = job.pids("gluon_esgd.launch.rank")
    os.kill(wrapper, signal.SIGKILL)  # which leaves the rank, in a session of its own
    job.wait_for("life 1")
    assert left not in job.processes() and wrapper not in job.processes()
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130


MPI_CLIENT = """
import sys, time
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
if MPI.COMM_WORLD.rank == 1:
    print("second", flush=True)
    time.sleep(600)
from tests.launch.fake_leader import main
main("stay")
"""


@pytest.mark.mpi
def test_a_client_of_several_ranks_lives_and_dies_as_one(start, vendor):
    mpi, python = vendor
    job = start(["-n", 4, "--clients", 2, "--mpiexec", mpi.mpiexec], [python, "-c", MPI_CLIENT])
    job.wait_for("filled", 2)
    others = [job.state(f"client0.rank{rank}.start")["pid"] for rank in range(2)]
    before = [job.state(f"client1.rank{rank}.start")["pid"] for rank in range(2)]
    os.kill(before[1], signal.SIGKILL)
    assert "client 1 rank 1 (pid" in job.wait_for("failed: SIGKILL")
    job.wait_for("filled True")
    left = job.processes()
    assert not set(before) & set(left) and set(others) <= set(left)
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130


@pytest.mark.parametrize(("role", "hard"), [("scheduler", False), ("server", True)])
def test_a_role_that_dies_is_followed_by_a_new_generation(start, role, hard):
    job = start([*TWO, "--port", 29300], leader("stay"))
    job.wait_for("filled", 2)
    (pid,) = job.pids(role)
    os.kill(pid, signal.SIGKILL)
    job.wait_for("go 2", 2)
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130
    last = generations(job)[-1]
    assert last["hard"] == hard and last["source"] in (0, 1)
    assert f"{role}{' 0' * hard} was killed by SIGKILL" in last["why"]


@pytest.mark.servers
def test_roles_of_the_real_station_are_handed_over(start):
    job = start([*TWO, "--servers", 2], leader("stay"), launcher="gluon_esgd.launch")
    job.wait_for("filled", 2)
    told = ask(job.dir, {"do": "status"})
    os.kill(told["servers"]["server 1"], signal.SIGKILL)
    job.wait_for("go 2", 2)
    assert "server 1 was killed by SIGKILL" in generations(job)[-1]["why"]
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130


def test_a_station_that_dies_is_started_again(start):
    job = start(TWO, leader("stay"))
    job.wait_for("filled", 2)
    (pid,) = job.pids("tests.launch.fake_station")
    os.kill(pid, signal.SIGKILL)
    job.wait_for("go ", 2)
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130
    assert f"station 0 (pid {pid} on localhost) failed: SIGKILL; starting another" in (
        job.err.decode()
    )
    assert any(g["why"].startswith("station 0 ended") for g in generations(job)[1:])


def test_a_station_that_cannot_start_fails_the_job(start):
    job = start(TWO, leader("stay"), FAKE_STATION="broken")
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (5, True)
    assert "station 0 (pid" in job.err.decode() and "  | broken" in job.err.decode()
    assert "starting another" not in job.err.decode()


def test_the_secret_is_in_no_log_no_environment_and_no_command_line(start):
    job = start(TWO, leader("stay"))
    job.wait_for("filled", 2)
    secret = re.compile(rb"[0-9a-f]{64}")
    for pid in job.processes():
        for name in ("cmdline", "environ"):
            assert not secret.search(Path(f"/proc/{pid}/{name}").read_bytes())
    for path in Path(job.dir).rglob("*"):
        assert not path.is_file() or not secret.search(path.read_bytes()), path
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130
    assert not secret.search(job.out + job.err)


def test_a_killed_launcher_leaves_no_station_and_no_role(start):
    job = start(TWO, leader("stay"))
    job.wait_for("filled", 2)
    job.popen.kill()
    assert job.wait_until_empty() < LIMIT_S
