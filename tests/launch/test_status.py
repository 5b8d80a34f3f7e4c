"""What a running job answers on its socket, and that nobody can hold its launcher up there."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from gluon_esgd.cli import main
from gluon_esgd.errors import LaunchError
from gluon_esgd.launch.control import ask
from gluon_esgd.launch.state import ended

from .test_restarts import leader

THREE = ("-n", 3, "--clients", 3, "--grace", 5)


def status(job):
    return ask(job.dir, {"do": "status"})


def until(job, predicate, limit_s=30):
    """Return the status of which `predicate` is true."""
    limit = time.monotonic() + limit_s
    while not predicate(status(job)):
        assert time.monotonic() < limit, status(job)
        time.sleep(0.05)
    return status(job)


def states(told):
    return [client["state"] for client in told["clients"]]


def test_a_job_tells_who_trains_and_who_serves(start, capsys):
    job = start(THREE, leader("stay"))
    job.wait_for("filled", 3)
    told = until(job, lambda told: all(client["step"] for client in told["clients"]))
    assert [client["client"] for client in told["clients"]] == [0, 1, 2]
    for number, client in enumerate(told["clients"]):
        assert client["pid"] == job.state(f"client{number}.rank0.start")["pid"]
        assert (client["state"], client["life"], client["step"]) == ("training", 0, 7)
        assert (client["exchanges"], client["lost"], client["staleness_s"]) == (2, 0, 0.5)
    assert told["generation"] == 1 and list(told["servers"]) == ["scheduler", "server 0"]
    assert told["servers"]["scheduler"] in job.pids("scheduler")
    assert main(["status", job.dir, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told
    assert main(["status", job.dir]) == 0
    head, first, *_, last = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["client", "state", "pid", "life"]
    assert first.split()[:2] == ["0", "training"] and "0.5" in first
    roles = ", ".join(f"{name} (pid {pid})" for name, pid in told["servers"].items())
    assert last == f"generation 1: {roles}"
    assert os.stat(Path(job.dir, "state", "control")).st_mode & 0o777 == 0o600
    job.popen.send_signal(signal.SIGINT)
    job.finish()
    assert main(["status", job.dir]) == 2
    none = f"gluon-esgd status: no job is running in {job.dir}; the last one ended at "
    said = capsys.readouterr().err
    assert said.startswith(none) and said.endswith(": the job was ended by Ctrl-C\n")


def test_a_client_can_leave_and_come_again(start, capsys):
    job = start(THREE, leader("stay"))
    job.wait_for("filled", 3)
    assert main(["remove-client", job.dir, "2"]) == 0
    assert capsys.readouterr().out == "client 2 is asked to end within 5 s\n"
    until(job, lambda told: states(told) == ["training", "training", "empty"])
    assert "go 2 of 2" in job.wait_for("go 2", 2)
    assert main(["add-client", job.dir]) == 0
    assert capsys.readouterr().out == "client 2 starts on localhost\n"
    assert "go 3 of 3" in job.wait_for("go 3", 3)
    assert "filled True" in job.wait_for("filled")
    told = until(job, lambda told: told["clients"][2]["step"] == 7)
    assert told["clients"][2]["life"] == 1
    assert main(["remove-client", job.dir, "3"]) == 2
    assert "client 3 is none of this job's, which are 0 to 2" in capsys.readouterr().err
    for client in ("0", "1"):
        assert main(["remove-client", job.dir, client]) == 0
    assert main(["remove-client", job.dir, "2"]) == 2
    assert "client 2 is the last one; end the job instead" in capsys.readouterr().err
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130


def raw(job, *pieces):
    """Send pieces of a question; return what comes back."""
    with socket.socket(socket.AF_UNIX) as sock:
        os_path = os.path.relpath(Path(job.dir, "state", "control"))
        sock.connect(os_path)
        sock.settimeout(20)
        for piece in pieces:
            sock.sendall(piece)
        return sock.makefile("rb").readline()


BAD = [b"\n", b"status\n", b"[" * 60000 + b"\n", b"[]\n", b'{"do": 7}\n', b"\xff\n", b"x" * 70000]


def test_bad_questions_are_answered_with_an_error_and_silent_ones_hold_nobody_up(running):
    silent = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for sock in silent:
        sock.connect(os.path.relpath(Path(running.dir, "state", "control")))
        sock.send(b'{"do": ')
    for question in BAD:
        assert "error" in json.loads(raw(running, question)), question
    assert states(json.loads(raw(running, b'{"do": "sta', b'tus"}\n'))) == ["training"]
    for sock in silent:
        sock.close()


@pytest.fixture
def running(start, monkeypatch, tmp_path):
    """A job of one client that only sleeps."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    job = start(["-n", 1], [sys.executable, "-c", "print('ready'); import time; time.sleep(600)"])
    job.wait_for("ready")
    monkeypatch.chdir(tmp_path)
    yield job
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130


def test_a_folder_whose_name_is_longer_than_an_address_is_fine(start, capsys, tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    job = start(
        ["-n", 1, "--job-dir", deep],
        [sys.executable, "-c", "print('ready'); import time; time.sleep(600)"],
    )
    job.wait_for("ready")
    assert main(["status", str(deep)]) == 0
    assert "training" in capsys.readouterr().out
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130


@pytest.mark.parametrize(
    "code, says",
    [(0, "without a failure"), (3, "client 0 rank 0 (pid {} on {}) failed: exit code 3")],
)
def test_a_job_that_is_over_says_how(start, code, says):
    job = start(["-n", 1], [sys.executable, "-c", f"raise SystemExit({code})"])
    job.finish()
    with pytest.raises(LaunchError) as none:
        status(job)
    record = job.state("client0.rank0.exit")
    assert str(none.value).endswith(": " + says.format(record["pid"], record["host"]))


@pytest.mark.parametrize(
    "content", ["", "[]", "[" * 60000, '{"time": 1e300, "how": ""}', '{"time": 0, "how": []}']
)
def test_what_is_no_end_of_a_job_is_not_shown(tmp_path, content):
    assert ended(str(tmp_path)) == ""
    (tmp_path / "state").mkdir()
    assert ended(str(tmp_path)) == "; its launcher was killed, or is just ending"
    (tmp_path / "state" / "end.json").write_text(content)
    assert ended(str(tmp_path)) == ""
