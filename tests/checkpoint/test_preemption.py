"""SIGTERM on any rank: all save after the same step and leave with 143."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ..pool import ROOT, Pools, Shape, environment, run_once
from .loops import make, positions, run


def terminate(worker: str, folder: str) -> None:
    """Train; the worker of this number, or "all", gets SIGTERM in epoch 1 before batch 2."""
    from gluon_esgd import world

    me, whom = world().worker_rank, range(world().num_workers) if worker == "all" else [int(worker)]

    def before(epoch: int, batch: int) -> None:
        if (epoch, batch) == (1, 2) and me in whom:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        settings = {"interval": 4, "batch": 1} if world().num_clients > 1 else {}
        run(folder, before=before, **settings)
    finally:
        print(f"\nworker {me} leaves\n", flush=True)


@pytest.mark.parametrize("worker", ["all", "1"])
@pytest.mark.mpi
def test_two_ranks_save_the_same_step_and_leave(pools: Pools, worker: str, tmp_path: Any) -> None:
    folder = str(tmp_path / "cut")
    ended = run_once(Shape(2), terminate, worker, folder)
    assert ended.code == 143, ended.output
    assert sorted(set(re.findall(r"worker (\d) leaves", ended.output))) == ["0", "1"]
    assert positions(folder)[0] == (1, 4), "after the step at which all knew"
    resumed = pools.get(Shape(2)).run(run, folder)
    whole = pools.get(Shape(2)).run(run, str(tmp_path / "whole"))
    assert [(r.weights, r.statistics) for r in resumed] == [
        (w.weights, w.statistics) for w in whole
    ]
    assert resumed[0].seen[0] == (1, 4)


@pytest.mark.mpi
def test_clients_of_a_split_world_leave_together(tmp_path: Any) -> None:
    ended = run_once(Shape(4, 2, 0, "esgd"), terminate, "3", str(tmp_path))
    assert ended.code == 143, ended.output
    places = [positions(str(tmp_path), client)[0] for client in (0, 1)]
    assert places[0] == places[1] and places[0][0] == 1 and places[0][1] > 2


@pytest.mark.servers
def test_a_client_leaves_and_the_other_trains_on(tmp_path: Any) -> None:
    ended = run_once(Shape(2, 2, 1, "esgd"), terminate, "1", str(tmp_path))
    assert "client 1 leaves after SIGTERM, in epoch 1" in ended.output
    assert positions(str(tmp_path), 1)[0][0] == 1


def wait_in_a_batch(folder: str) -> None:
    """Train until a second SIGTERM ends it."""
    _, _, state, loader = make(folder)
    for _ in state.epochs(1):
        for _ in state.batches(loader):
            print("ready", flush=True)
            while not state._decisions.signal.came:
                time.sleep(0.01)
            print("still here", flush=True)
            while True:
                time.sleep(0.01)


def said_by(process: subprocess.Popen) -> bytes:
    """Return the next line, or fail with what the kernel knows of the process and its signals."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], 60)[0]:
        pytest.fail(Path(f"/proc/{process.pid}/status").read_text())
    return process.stdout.readline()


def test_signals_that_come_together_are_one_and_a_later_one_ends_at_once(tmp_path: Any) -> None:
    call = f"from {__name__} import wait_in_a_batch as f; f({str(tmp_path)!r})"
    with subprocess.Popen(
        [sys.executable, "-c", call], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, bufsize=0
    ) as process:
        try:
            assert said_by(process) == b"ready\n"
            first = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert said_by(process) == b"still here\n"
            while process.poll() is None and time.monotonic() < first + 20:
                process.send_signal(signal.SIGTERM)
                time.sleep(0.05)
            assert process.wait(20) == -signal.SIGTERM
            assert time.monotonic() - first > 2, "it was given no time to save"
        finally:
            process.kill()
    assert positions(str(tmp_path)) == []


def test_what_was_there_before_is_put_back(tmp_path: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    _, _, state, loader = make(str(tmp_path))
    for _ in state.epochs(1):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(RuntimeError, match=r"batches\(\) counts one pass in each epoch"):
        next(state.batches(loader))


def leave_the_loop(folder: str) -> None:
    """Stop early, as scripts do, and come to a clean end."""
    net, trainer, state, loader = make(folder)
    from ..training.problems import train_step

    for _ in state.epochs(2):
        for i, (x, y) in enumerate(state.batches(loader)):
            train_step(net, trainer, x.asnumpy(), y.asnumpy())
            if i == 2:
                break
        break


@pytest.mark.mpi
def test_a_loop_that_is_left_ends_well(tmp_path: Any) -> None:
    ended = run_once(Shape(2), leave_the_loop, str(tmp_path))
    assert ended.code == 0, ended.output
