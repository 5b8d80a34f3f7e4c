"""What goes wrong on one rank is said on all of them, the job ends, and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any, Dict, List

import mxnet as mx
import pytest

from ..pool import Shape, run_once
from .problems import batches, network, train_step
from .telling import (
    before_packing,
    fail_at_step_3,
    telling,
    train_and_tell,
    worker_rank,
    workers_that_raised,
)

PURE = pytest.mark.mpi
LIMITS = (("GLUON_ESGD_STALL_WARNING_S", "0.5"), ("GLUON_ESGD_STALL_ABORT_S", "2"))


def packing_fails() -> None:
    fail_at_step_3(worker=1)
    train_and_tell(10, lambda i, trainer: mx.nd.waitall())


@PURE
def test_an_error_in_the_engine_comes_out_of_the_next_step_on_all_ranks() -> None:
    ended = run_once(Shape(3), packing_fails)
    assert ended.code != 0
    assert workers_that_raised(ended.output) == ["0", "1", "2"]
    bucket = r"CollectiveError: gradient bucket 0 \(\w+_bias to \w+_weight, 4 parameters\)"
    cause = r", step 3, seen by rank \d: rank 1: packing failed: MemoryError\('no room"
    assert len(re.findall(bucket + cause, ended.output)) == 3


def one_rank_has_stale_gradients() -> None:
    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x, y = batches()
    with telling():
        train_step(net, trainer, x[0], y[0])
        if worker_rank() == 1:
            trainer.step(4)  # without a backward pass
        for i in range(3):
            train_step(net, trainer, x[i], y[i])
            mx.nd.waitall()


@PURE
def test_a_stale_gradient_on_one_rank_is_said_on_the_others() -> None:
    ended = run_once(Shape(2), one_rank_has_stale_gradients)
    assert ended.code != 0
    assert re.search(r"worker 1 raised UserWarning: Gradient of Parameter", ended.output)
    assert re.search(
        r"worker 0 raised CollectiveError: .*rank 1: gradient of \w+ was not updated by backward",
        ended.output,
    )


def one_rank_sleeps() -> None:
    train_and_tell(6, lambda i, _: time.sleep(60 if (i, worker_rank()) == (3, 1) else 0), (1,))


@PURE
def test_a_stall_is_reported_and_ends_within_its_limit() -> None:
    ended = run_once(Shape(2, settings=LIMITS), one_rank_sleeps, timeout=30)
    assert ended.code != 0
    missing = r"rank 0 of 2 waits in .*; on this node rank\(s\) \[1\] have not come to it"
    assert re.search(missing + r"; waited \d+ s so far", ended.output)
    assert re.search(
        r"StallError: rank 0 of 2 waits in gradient bucket 0 .*, step 4;", ended.output
    )


PACE_S = 0.01  # so that the agent is replaced while there are steps left, on few cores too


def agent_killed(settings: Dict[str, int]) -> None:
    from gluon_esgd.job import job

    def before(i: int, _: Any) -> None:
        link = job()._link
        if i == 5 and link is not None and job().world.client == 1:
            os.kill(link.agent_pid, signal.SIGKILL)
        time.sleep(PACE_S)

    train_and_tell(500, before, **settings)


@pytest.mark.servers
def test_a_lost_agent_is_replaced_while_training_goes_on() -> None:
    ended = run_once(Shape(4, 2, 1, "esgd"), agent_killed, {"interval": 2}, timeout=60)
    assert ended.code == 0, ended.output
    assert "gluon-esgd: generation 2: client 1 lost its agent" in ended.output


@pytest.mark.servers
def test_under_sgd_a_lost_agent_ends_the_job() -> None:
    ended = run_once(Shape(4, 2, 1, "sgd"), agent_killed, {}, timeout=60)
    assert ended.code != 0
    why = "client 1 lost its agent: .*; under rule sgd there is no center to go on from"
    assert re.search(why, ended.output), ended.output


def one_client_fails() -> None:
    fail_at_step_3(worker=0)
    train_and_tell(20, lambda i, trainer: mx.nd.waitall())


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2, 2, 0, "sgd"), marks=PURE, id="split"),
        pytest.param(Shape(2, 2, 1, "sgd"), marks=pytest.mark.servers, id="servers"),
    ],
)
def test_under_sgd_the_other_clients_learn_of_an_error_at_once(shape: Shape) -> None:
    ended = run_once(shape, one_client_fails)
    assert ended.code != 0 and ended.seconds < 40
    assert re.search(r"worker 0 raised CollectiveError: .*no room for the bucket", ended.output)
    assert re.search(
        r"worker 1 raised LostClientsError: .*a rank of another client has the cause", ended.output
    )


def step_does_not_wait(rule: str, *cases: str) -> None:
    from gluon_esgd import ElasticTrainer

    before_packing(lambda step: time.sleep(0.2))
    x, y = batches()
    for case in cases:
        net = network()
        interval, lazy = map(int, case.split("-"))
        trainer = ElasticTrainer(
            net.collect_params(), "sgd", rule=rule, interval=interval, lazy=lazy
        )
        train_step(net, trainer, x[0], y[0])
        before = trainer.counters.step_wait_s
        for i in range(8):
            train_step(net, trainer, x[i], y[i])
        waited = trainer.counters.step_wait_s - before
        print(f"\nworker {worker_rank()} waited {waited:.3f} s\n", flush=True)
        trainer.finish()


@pytest.mark.servers
@pytest.mark.parametrize(("rule", "cases"), [("asgd", ["1-1"]), ("esgd", ["3-3", "2-0"])])
def test_a_step_does_not_wait_for_its_communication(rule: str, cases: List[str]) -> None:
    """Each case is interval and lazy."""
    ended = run_once(Shape(4, 2, 1, rule), step_does_not_wait, rule, *cases)
    assert ended.code == 0, ended.output
    waited = re.findall(r"worker \d waited ([\d.]+) s", ended.output)
    # Eight collectives of 0.2 s each were in the way: a step that waits for one takes that long.
    assert len(waited) == 4 * len(cases) and max(map(float, waited)) < 0.8, waited
