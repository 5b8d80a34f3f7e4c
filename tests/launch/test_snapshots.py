"""The center on disk, in real jobs: when every process that held it in memory is gone."""

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from gluon_esgd.launch import proc

from ..pool import until
from .conftest import LIMIT_S

WAIT_S = 60.0
JOB = ("-n", 2, "--clients", 2, "--servers", 1, "--rule", "esgd", "--interval", 1)

# Each client tells the center that it begins with. In its first life it goes from there, 1, towards
# 9, until it is killed; client 0 leaves on the way where that was asked for.
SCRIPT = """
import sys, os, mxnet as mx
from gluon_esgd import ElasticTrainer, world
leaves, stays = sys.argv[1] == "leaves", "AGAIN" not in os.environ and not world().settings.life
param = mx.gluon.Parameter("w", shape=(3,), init=mx.init.One())
param.initialize()
trainer = ElasticTrainer([param], "sgd", {"learning_rate": 0.02}, interval=1)
with trainer.center():
    print("center", *[repr(float(value)) for value in param.data().asnumpy()], flush=True)
while stays:
    with mx.autograd.record():
        loss = (param.data() - 9) ** 2
    loss.backward()
    trainer.step(1)
    if leaves and world().client == 0 and float(param.data()[0].asscalar()) > 3:
        break
trainer.finish()
"""


def begin(start, *arguments, leaves="stays", **environ):
    command = [sys.executable, "-c", SCRIPT, leaves]
    every = ("--center-snapshot", 0.1)
    return start([*JOB, *every, *arguments], command, launcher="gluon_esgd.launch", **environ)


def snapshot(job):
    """File and content of the center on disk, once there is one."""
    files = list(Path(job.dir, "checkpoints", "center").glob("*.npy"))
    return (files[0], np.load(files[0])) if files else None


def moved(job, beyond):
    return until(lambda: (snapshot(job) or (0, np.zeros(1)))[1][0] > beyond, WAIT_S)


def told(job, client):
    """The centers that the lives of a client have begun with."""
    text = Path(job.dir, "logs", f"client{client}.rank0.log").read_text()
    return [np.array(line.split(), np.float32) for line in re.findall(r"^center (.*)$", text, re.M)]


def lose(job):
    """Kill the launcher and all that it has started, at once."""
    job.popen.kill()
    proc.kill_job(job.marker)
    assert job.wait_until_empty() < LIMIT_S


def resumed(start, job):
    """Resume; what its clients begin with, and the log of the first."""
    again = begin(start, "--resume", job.dir, AGAIN="1")
    assert again.finish(WAIT_S)[0] == 0, again.err
    one, other = told(job, 0)[-1], told(job, 1)[-1]
    assert one.tobytes() == other.tobytes()
    return one, Path(job.dir, "logs", "client0.rank0.log").read_text()


@pytest.mark.servers
def test_a_job_of_which_all_was_killed_goes_on_from_a_whole_center_on_disk(start):
    job = begin(start)
    moved(job, 3)
    lose(job)
    path, left = snapshot(job)
    assert resumed(start, job)[0].tobytes() == left.tobytes()
    assert [p for p in path.parent.iterdir() if p.suffix == ".npy"] == [path]
    os.truncate(path, 130)
    center, said = resumed(start, job)
    assert (center == 1).all() and f"{path} is damaged" in said


@pytest.mark.servers
def test_the_last_client_comes_back_to_the_center_on_disk(start):
    job = begin(start, leaves="leaves")
    until(lambda: Path(job.dir, "state", "client0.rank0.exit").exists(), WAIT_S)
    moved(job, 5)  # written by the client that is left: the other went at 3
    os.kill(job.state("client1.rank0.start")["pid"], signal.SIGKILL)
    assert job.finish(WAIT_S)[0] == 0, job.err
    first, second = told(job, 1)
    assert (first == 1).all() and second.tobytes() == snapshot(job)[1].tobytes()
    assert (second > 5).all()
    assert "client 1 starts again" in job.err.decode()
