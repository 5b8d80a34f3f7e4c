"""Whole jobs that train, real in all their parts, while clients, servers and hosts come and go."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from gluon_esgd.cli import main

from .conftest import LIMIT_S
from .test_status import states, until

ESGD = ("--rule", "esgd", "--interval", 2)
LAUNCH = {"launcher": "gluon_esgd.launch"}


def trains(epochs=100_000, rate=0.0):
    return [sys.executable, "-m", "tests.launch.trains", str(epochs), str(rate)]


def enough(job):
    """Let the job end at the end of its epoch; return each client's center and loss."""
    Path(job.dir, "enough").touch()
    assert job.finish()[0] == 0, job.err
    said = re.findall(r"center (\w+) loss ([0-9.]+)", job.out.decode())
    return {center for center, _ in said}, [float(loss) for _, loss in said]


def epochs(job, client, folder="logs"):
    """What a leader said at the start of its epochs."""
    return [int(n) for n in re.findall(r"^epoch (\d+) ", log(job, client, folder), re.M)]


def log(job, client, folder="logs"):
    return Path(job.dir, folder, f"client{client}.rank0.log").read_text()


@pytest.mark.servers
def test_a_third_client_trains_with_two_and_one_of_the_first_leaves(start, capsys):
    job = start(["-n", 2, "--clients", 2, *ESGD], trains(), **LAUNCH)  # at rate 0 nothing moves
    first = job.wait_for("batches 6 of 2 place 1 alpha 0.450")
    assert first.startswith("[client 1 rank 0]")
    until(job, lambda told: all(client["exchanges"] for client in told["clients"]), 60)
    assert main(["add-client", job.dir]) == 0
    job.wait_for("[client 2 rank 0] epoch")
    job.wait_for("batches 4 of 3 place 2 alpha 0.300")
    told = until(job, lambda told: all(client["exchanges"] for client in told["clients"]))
    assert states(told) == ["training"] * 3 and told["clients"][2]["step"] > 0
    assert main(["status", job.dir]) == 0
    said = capsys.readouterr().out
    assert "client 2 starts on localhost" in said
    assert len(re.findall(r"^ *\d  training ", said, re.M)) == 3
    assert main(["remove-client", job.dir, "1"]) == 0
    assert "[client 2 rank 0]" in job.wait_for("batches 6 of 2 place 1 alpha 0.450")
    until(job, lambda told: states(told) == ["training", "empty", "training"])
    centers, _ = enough(job)
    begins = [re.search(r"begins with (\w+)", log(job, client)) for client in (0, 2)]
    assert centers == {begins[0][1]} != {begins[1][1]}  # who comes moves nothing
    assert "generation 3: client 1 left" in job.err.decode()
    seen = epochs(job, 2)
    assert seen == sorted(set(seen)) and seen[0] > 0  # it came to where client 0 was


HOSTS = ("--hosts", "127.0.0.2:1,127.0.0.3:1", "--remote-shell", "fakesh")


def parent(pid):
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^PPid:\t(\d+)", text, re.M)[1])


def recovers(job, before, times=1):
    """Wait until both clients have exchanged in a later generation than that of `before`."""
    after = until(job, lambda told: told["generation"] > before["generation"], 60)
    lives = [client["life"] for client in after["clients"]]
    counts = [client["exchanges"] or 0 for client in after["clients"]]

    def exchanged(told):
        assert [client["life"] for client in told["clients"]] == lives
        return all(c["exchanges"] >= n + times for c, n in zip(told["clients"], counts))

    return until(job, exchanged, 60)


@pytest.mark.servers
def test_training_goes_on_whatever_dies_on_another_host(start, remote):
    servers = ["-n", 2, "--clients", 2, "--servers", 2]
    job = start([*servers, *ESGD, *HOSTS], trains(rate=0.05), **LAUNCH, **remote)
    job.wait_for("epoch 0", 2)
    told = until(job, lambda told: all(client["exchanges"] for client in told["clients"]), 60)
    os.kill(told["servers"]["server 1"], signal.SIGKILL)
    told = recovers(job, told)
    server = told["servers"]["server 1"]
    os.kill(parent(parent(server)), signal.SIGKILL)  # zygote, station
    told = recovers(job, told)
    os.kill(job.state("client1.rank0.start")["pid"], signal.SIGKILL)
    told = recovers(job, told, times=40)  # which is enough for the loss below, whatever was lost
    assert [client["life"] for client in told["clients"]] == [0, 1]
    _, losses = enough(job)
    assert len(losses) == 2 and max(losses) < 0.01, losses
    said = job.err.decode()
    assert "server 1 was killed by SIGKILL" in said and "station 1 ended" in said
    assert "client 1 came back" in said
    assert re.search(r"station 1 \(pid \d+ on 127.0.0.3\) failed: .*; starting another", said)


@pytest.mark.mpi
def test_sigterm_saves_a_checkpoint_of_a_client_over_two_hosts(start, remote):
    """Under MPICH: ranks of Open MPI do not meet over two hosts that are one machine."""
    job = start(["-n", 2, *HOSTS], trains(), **LAUNCH, **remote)
    job.wait_for("epoch 1")
    job.popen.terminate()
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (143, True), job.err
    assert "client 0 leaves after SIGTERM, in epoch" in job.out.decode()
    assert any(Path(job.dir, "checkpoints", "client0").iterdir())


@pytest.mark.servers
def test_sigterm_while_a_server_is_dead_saves_a_checkpoint_in_time(start):
    job = start(["-n", 2, "--clients", 2, *ESGD], trains(), **LAUNCH)
    job.wait_for("epoch 2", 2)
    told = until(job, lambda told: all(client["exchanges"] for client in told["clients"]), 60)
    os.kill(told["servers"]["server 0"], signal.SIGKILL)
    job.popen.terminate()
    code, took = job.finish()
    assert (code, took < LIMIT_S) == (143, True), job.err
    for client in range(2):
        assert f"client {client} leaves after SIGTERM, in epoch" in log(job, client)
        assert any(Path(job.dir, "checkpoints", f"client{client}").iterdir())


@pytest.mark.servers
def test_a_job_whose_launcher_was_killed_is_gone_on_with(start):
    job = start(["-n", 2, "--clients", 2, *ESGD], trains(8, 0.05), **LAUNCH)
    job.wait_for("epoch 3", 2)
    job.popen.kill()
    assert job.wait_until_empty() < LIMIT_S
    again = start(["-n", 2, "--clients", 2, *ESGD, "--resume", job.dir], trains(8, 0.05), **LAUNCH)
    assert again.finish()[0] == 0, again.err
    for client in range(2):
        before, after = epochs(job, client, "logs.1"), epochs(job, client)
        assert before[:4] == [0, 1, 2, 3] and before[-1] < 7, "it was killed in mid-training"
        assert after == list(range(before[-1], 8)) or after == list(range(before[-1] + 1, 8))
    assert again.out.decode().count("center") == 2
