"""Hosts of namespaces: what they are, what is left of them, and jobs on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gluon_esgd.launch import proc

from .pool import OPEN_MPI_PYTHON, ROOT, environment

sys.path.insert(0, str(ROOT / "benchmarks"))
from cluster import Cluster, Network, why_impossible
from convergence import beyond

pytestmark = pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible()))


@pytest.fixture(scope="module")
def racks():
    network = Network(hosts=2, rate="1gbit", racks=2, uplink="20mbit", server_rate="20mbit")
    with Cluster(network) as cluster:
        yield cluster


def say(cluster: Cluster, host: int, line: str) -> str:
    process = cluster.start(host, ["sh", "-c", line], stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output.decode().strip()


def test_hosts_have_names_processes_and_shared_memory_of_their_own(racks):
    assert [say(racks, k, "hostname") for k in range(3)] == ["h1", "h2", "h3"]
    say(racks, 0, "touch /dev/shm/mine")
    assert say(racks, 0, "ls /dev/shm") == "mine" and say(racks, 1, "ls /dev/shm") == ""
    assert int(say(racks, 1, "ls -d /proc/[0-9]* | wc -l")) < 10


def test_the_remote_shell_passes_streams_and_exit_codes_on(racks):
    line = f"echo in | {racks.shell} -q {racks.addresses[1]} 'read x; echo $x $(hostname); exit 7'"
    assert say(racks, 0, f"{line}; echo $?") == "in h2\n7"
    there = f"{racks.shell} -o Some=thing h2"
    assert say(racks, 0, f"{there} 'kill -9 $$' </dev/null; echo $?") == "137"


def test_a_killed_remote_shell_takes_the_streams_with_it(racks):
    line = "echo up; cat; hostname > /dev/shm/ended"
    process = racks.start(1, ["sh", "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    process.kill()
    assert say(racks, 1, "while [ ! -s /dev/shm/ended ]; do sleep 0.05; done; echo yes") == "yes"
    process.communicate(timeout=10)


RECEIVE = """
import socket
connection, _ = socket.create_server(("0.0.0.0", 5000)).accept()
count = 0
while piece := connection.recv(65536):
    count += len(piece)
print(count)
"""
SEND = """
import socket, sys, time
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 5000))
        break
    except OSError:
        time.sleep(0.05)
start = time.time()
connection.sendall(bytes(1000000))
connection.shutdown(1)
connection.recv(1)
print(time.time() - start)
"""


def test_bytes_cross_shaped_links_and_are_counted(racks):
    before = racks.traffic()
    run = [sys.executable, "-c"]
    receiver = racks.start(1, [*run, RECEIVE], stdout=subprocess.PIPE)
    sender = racks.start(0, [*run, SEND, racks.addresses[1]], stdout=subprocess.PIPE)
    seconds = float(sender.communicate(timeout=60)[0])
    assert int(receiver.communicate(timeout=60)[0]) == 1_000_000
    after = racks.traffic()
    for place, way in (("h1", "out"), ("rack 0", "out"), ("rack 1", "in"), ("h2", "in")):
        assert 1_000_000 < after[place][way] - before[place][way] < 1_200_000, (place, way)
    assert after["h3"]["in"] - before["h3"]["in"] < 10_000
    assert seconds > 0.25  # 1 MB at 20 Mbit/s takes 0.4 s; 256 kB pass at once


def test_nothing_is_left_of_a_killed_cluster():
    script, sh = str(ROOT / "benchmarks" / "cluster.py"), ["sh", "-c", "echo up; sleep 1000"]
    process = subprocess.Popen(
        [sys.executable, script, "--hosts", "2", "--", *sh], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    assert len(proc.descendants(process.pid)) > 5
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)  # the pipe of its output is closed when nobody has it any more


@pytest.mark.parametrize(
    ("network", "fault"),
    [
        ({"hosts": 0, "rate": "1gbit"}, "hosts is 0"),
        ({"hosts": 3, "rate": "1gbit", "racks": 2, "uplink": "1mbit"}, "racks is 2"),
        ({"hosts": 2, "rate": "1gbit", "racks": 2}, "uplink"),
        ({"hosts": 2, "rate": "fast"}, "'fast' is no rate"),
    ],
)
def test_a_network_that_cannot_be(network, fault):
    with pytest.raises(ValueError, match=fault):
        Network(**network)


def run(script: str, *options: str, timeout: float = 200, python: str = sys.executable) -> str:
    command = [python, str(ROOT / "benchmarks" / script), *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(290)
def test_an_epoch_by_mxnet_by_esgd_and_by_mpi_over_two_hosts(tmp_path: Path):
    output = tmp_path / "epoch.json"
    run("epoch.py", "--quick", "--output", str(output))
    rows = json.loads(output.read_text())["rows"]
    assert [row["name"] for row in rows] == ["alone", "MXNet dist_sync", "mpi-ESGD", "mpi-SGD"]
    alone, stock, elastic, mpi = rows
    size = 1e6
    assert alone["busiest_link_bytes"] < 0.01 * size
    # Two of four workers are away from the server: pushed and pulled in each step.
    assert 2 * size < stock["busiest_link_bytes"] < 2.4 * size
    assert elastic["steps_per_exchange"] == 4 and mpi["steps_per_exchange"] is None
    assert elastic["exchanges"] >= 2 and 0.2 * size < elastic["busiest_link_bytes"] < size
    assert size < mpi["busiest_link_bytes"] < 1.2 * size  # 2 (N - 1) / N of it, N = 2
    for row in rows:
        assert row["step_s"] > 0 and row["cpu_s"]["workers"] > 0
    said = run("epoch_report.py", str(output))
    ratio = stock["step_s"] / elastic["step_s"]
    assert f"| mpi-ESGD | 2 | 1 | {elastic['step_s']:.2f} |" in said and f"| {ratio:.1f} |" in said
    said = run("predictions.py", "--held-back", str(output))
    assert said.count("| 2 | 100 | 1 |") == 3 and "of 3 within 20%" in said


@pytest.mark.parametrize("python", [sys.executable, OPEN_MPI_PYTHON], ids=["mpich", "openmpi"])
def test_collectives_over_a_link(tmp_path: Path, python: str):
    output = tmp_path / "allreduce.json"
    run("cluster_allreduce.py", "--quick", "--output", str(output), python=python)
    rows = {(r["collective"], r["algorithm"]): r for r in json.loads(output.read_text())["rows"]}
    assert len(rows) == 6
    for collective in ("allreduce", "broadcast"):
        row = rows[collective, "hierarchical"]
        assert 0.95 < row["over_needed"] < 1.3
        ratio = rows[collective, "library"]["seconds"] / row["seconds"]
        assert row["times_as_fast_as_library"] == pytest.approx(ratio)
    said = run("cluster_allreduce_report.py", str(output))
    assert said.count(f", {ratio:.2f} |") >= 1 and said.count("| 2 | 100mbit | 0.5 |") == 2


def test_a_trial_of_the_tuning_is_worth_what_it_ends_with():
    def trial(lr, *accuracies):
        looks = [{"accuracy": accuracy} for accuracy in accuracies]
        return {"lr": lr, "seed": 0, "center": looks, "target_s": None}

    low, middle, high = trial(0.02, 0.3, 0.2), trial(0.06, 0.4, 0.1), trial(0.2, 0.1, 0.1)
    further = beyond([low, middle, high])  # the middle one was better, but diverged
    assert further == {"lr": 0.0067, "seed": 0}
    middle["target_s"] = 9.0
    assert beyond([low, middle, high]) is None


@pytest.mark.timeout(290)
def test_convergence_from_tuning_to_sweeps(tmp_path: Path):
    output = tmp_path / "convergence.json"
    run("convergence.py", "all", "--quick", "--output", str(output), timeout=280)
    found = json.loads(output.read_text())
    tuned = found["tune"]["mpi-ESGD"]
    tried = [(t["lr"], t["interval"]) for t in tuned["trials"]]
    assert tried[:6] == [(lr, tau) for lr in (0.02, 0.06, 0.2) for tau in (16, 64)]
    assert len(tried) <= 8 and all(not 0.02 <= lr <= 0.2 for lr, _ in tried[6:])  # beyond the ends
    assert tuned["chosen"] in [{k: t[k] for k in ("lr", "interval")} for t in tuned["trials"]]
    for stage in ("run", "final"):
        (trial,) = found[stage]["mpi-ESGD"]["trials"]
        assert {k: trial[k] for k in ("lr", "interval")} == tuned["chosen"] and trial["seed"] == 1
        looks = trial["center"]
        assert [look["seconds"] for look in looks] == sorted(look["seconds"] for look in looks)
        assert all(0 <= look["accuracy"] <= 1 and look["samples"] % 128 == 0 for look in looks)
    assert found["final"]["mpi-ESGD"]["trials"][0]["center"][-1]["samples"] >= 1000
    (trial,) = found["sweep"]["interval"]["trials"]
    assert trial["interval"] == 1 and trial["exchanges"] >= 1
    (trial,) = found["sweep"]["outer"]["trials"]
    assert trial["outer"] == {"momentum": 0.3}
    assert "| mpi-ESGD |" in run("convergence_report.py", str(output))
