"""How a job ends: well, with its last exchange, or with the cause and a code."""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import time
from typing import Any, List

import mxnet as mx
import pytest
from mxnet import autograd, gluon

from ..pool import Shape, label, run_once
from .problems import batches, network, train_step
from .shapes import ESGD
from .telling import fail_at_step_3, train_and_tell, worker_rank

PURE = pytest.mark.mpi


def user_code_fails() -> None:
    def before(i: int, _: Any) -> None:
        if i == 3 and worker_rank() == 1:
            raise KeyError("a fault of the script")

    train_and_tell(1000, before)


@PURE
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exception_on_one_rank_ends_the_job(ranks: int) -> None:
    ended = run_once(Shape(ranks), user_code_fails, timeout=30)
    assert ended.code != 0
    assert "KeyError: 'a fault of the script'" in ended.output


def one_rank_has_fewer_batches() -> None:
    train_and_tell(5 if worker_rank() == 1 else 50, lambda i, _: None, silent=(1,))


@PURE
def test_a_rank_with_fewer_batches_is_named_at_once() -> None:
    ended = run_once(Shape(2), one_rank_has_fewer_batches, timeout=30)
    assert ended.code != 0
    assert re.search(
        r"worker 0 raised CollectiveError: the ranks are out of step: rank 0 is in gradient bucket "
        r"0 .*, step 6, rank 1 in ",
        ended.output,
    )


def killed() -> None:
    def before(i: int, _: Any) -> None:
        if i == 3 and worker_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train_and_tell(1000, before)


@PURE
def test_a_killed_rank_ends_the_job() -> None:
    ended = run_once(Shape(2), killed, timeout=30)
    assert ended.code != 0 and ended.seconds < 25


def ends_without_finish() -> None:
    from gluon_esgd import ElasticTrainer

    net = network()
    made: List[Any] = []
    atexit.register(lambda: print(f"worker {worker_rank()} made {made[0].counters.exchanges}"))
    made.append(ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))
    x, y = batches()
    for i in range(3):
        train_step(net, made[0], x[i], y[i])
    if worker_rank() == 1:
        time.sleep(0.5)  # ranks need not end at the same moment


@ESGD
def test_a_clean_end_makes_the_last_exchange(shape: Shape) -> None:
    ended = run_once(shape, ends_without_finish)
    assert ended.code == 0, ended.output
    assert sorted(re.findall(r"worker (\d) made (\d)", ended.output)) == [
        (str(worker), "1") for worker in range(4)
    ]


def train_a_little() -> None:
    from gluon_esgd import ElasticTrainer

    net = gluon.nn.Dense(2, in_units=3)
    net.initialize()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with autograd.record():
        loss = net(mx.nd.ones((4, 3)))
    loss.backward()
    trainer.step(4)
    mx.nd.waitall()
    if worker_rank() == 0:
        atexit.register(print, trainer)  # so long it is known here


def one_rank_still_has_the_trainer() -> None:
    train_a_little()
    gc.collect()


@PURE
def test_ranks_whose_collectors_differ_come_to_a_good_end() -> None:
    ended = run_once(Shape(2), one_rank_still_has_the_trainer, timeout=30)
    assert ended.code == 0, ended.output


def last_step_fails(waits: str) -> None:
    from gluon_esgd import ElasticTrainer

    fail_at_step_3(worker=1)
    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x, y = batches()
    for i in range(3):
        train_step(net, trainer, x[i], y[i])
    if waits == "waits":
        mx.nd.waitall()


@PURE
@pytest.mark.parametrize("waits", ["waits", "ends"])
def test_a_failure_that_no_step_meets_is_no_good_end(waits: str) -> None:
    ended = run_once(Shape(2), last_step_fails, waits)
    assert ended.code != 0
    assert "no room for the bucket" in ended.output


@pytest.mark.servers
def test_the_launcher_names_the_rank_whose_script_failed() -> None:
    ended = run_once(Shape(4, 2, 1, "esgd"), user_code_fails)
    assert ended.code != 0
    last = ended.output[ended.output.rindex("gluon-esgd: ") :]
    assert re.search(r"client 0 rank 1 \(pid \d+", last), last
    assert re.search(r"log: \S+client0\.rank1\.log", last), last


def one_rank_makes_one_more_step() -> None:
    train_and_tell(6 if worker_rank() == 0 else 5, lambda i, _: None, silent=(1,))


@PURE
def test_one_more_step_on_one_rank_is_named_at_the_end() -> None:
    ended = run_once(Shape(2), one_rank_makes_one_more_step, timeout=30)
    assert ended.code != 0
    assert re.search(r"out of step: rank 0 is in .*, step 6, rank 1 in ", ended.output)


def center_on_one_rank() -> None:
    from gluon_esgd import ElasticTrainer

    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=6), gluon.nn.BatchNorm(in_channels=4))
    net.initialize()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x, y = batches()
    for i in range(3):
        train_step(net, trainer, x[i], y[i])
    if worker_rank() == 0:
        with trainer.center():
            print("the center was shown")


@PURE
def test_center_on_one_rank_only_is_an_error_and_no_result() -> None:
    ended = run_once(Shape(2), center_on_one_rank, timeout=30)
    assert ended.code != 0
    assert "out of step" in ended.output or "have left" in ended.output
    assert "the center was shown" not in ended.output


def crash() -> None:
    import ctypes

    def before(i: int, _: Any) -> None:
        if i == 4 and worker_rank() == 1:
            ctypes.string_at(0)

    train_and_tell(100, before, interval=1)


@pytest.mark.servers
def test_a_crash_with_operations_pending_ends_the_rank() -> None:
    ended = run_once(Shape(2, 2, 1, "esgd"), crash, timeout=60)
    assert ended.code == 128 + signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ended.output
    assert re.search(r"client 1 rank 0 .*SIGSEGV", ended.output)


def finalizes_mpi() -> None:
    from mpi4py import MPI

    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x, y = batches()
    train_step(net, trainer, x[0], y[0])
    mx.nd.waitall()
    MPI.Finalize()


@PURE
@pytest.mark.parametrize("shape", [Shape(2), Shape(2, 2, 0, "esgd")], ids=label)
def test_mpi_finalized_before_the_end_is_said(shape: Shape) -> None:
    ended = run_once(shape, finalizes_mpi, timeout=60)
    assert ended.code != 0
    assert "call trainer.finish() before MPI.Finalize()" in ended.output
