"""Learning rates, schedules and optimizer classes of scripts, in distributed jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from ..pool import ROOT, Pools, Shape, environment
from .optimizers import make, parameters
from .shapes import ANY_RANKS
from .telling import worker_rank

DEVICES = [mx.cpu(0), mx.cpu(1)]


def _decrements(optimizer: Any, steps: int, at: Any = None) -> Tuple[List[float], List[float]]:
    """By how much each step lowers a weight whose gradient is 1, and the learning rate after it."""
    from gluon_esgd import ElasticTrainer, world

    param = gluon.Parameter("w", shape=(3,))
    param.initialize(mx.init.Zero(), ctx=DEVICES)
    far = {"interval": 64} if world().settings.num_servers else {}
    trainer = ElasticTrainer([param], optimizer, **far)
    decrements, rates = [], []
    for step in range(steps):
        if at is not None:
            at(trainer, step)
        before = param.list_data()[1].asnumpy()
        with autograd.record():
            losses = [data.sum() for data in param.list_data()]
        autograd.backward(losses)
        trainer.step(2)
        decrements.append(float((before - param.list_data()[1].asnumpy())[0]))
        rates.append(float(trainer.learning_rate))
    trainer.finish()
    return decrements, rates


def _schedule() -> mx.lr_scheduler.LRScheduler:
    return mx.lr_scheduler.FactorScheduler(step=4, factor=0.5, base_lr=1.0)


def _scheduled() -> Tuple[List[float], List[float]]:
    return _decrements(mx.optimizer.create("sgd", lr_scheduler=_schedule()), 12)


@ANY_RANKS
def test_schedules_count_steps_whatever_devices_and_clients(pools: Pools, shape: Shape) -> None:
    schedule = _schedule()
    expected = [schedule(step) for step in range(1, 13)]
    assert len(set(expected)) == 3
    for decrements, rates in pools.get(shape).run(_scheduled):
        np.testing.assert_allclose(decrements, expected, rtol=1e-5)
        assert rates == expected


def _set_rate() -> Tuple[List[float], List[float]]:
    def at(trainer: Any, step: int) -> None:
        if step == 2:
            trainer.set_learning_rate(0.125)

    return _decrements(mx.optimizer.create("sgd", learning_rate=1.0), 4, at)


@ANY_RANKS
def test_a_learning_rate_holds_from_the_next_step_on_every_rank(pools: Pools, shape: Shape) -> None:
    expected = [1.0, 1.0, 0.125, 0.125]
    assert pools.get(shape).run(_set_rate) == [(expected, expected)] * shape.workers


def _differing(other: str) -> str:
    """What making a trainer says where one rank has another optimizer."""
    from gluon_esgd import ElasticTrainer

    optimizer = make("sgd")
    if worker_rank() == 1:
        optimizer = make(other) if other != "sgd" else make("sgd", momentum=0.25)
    with pytest.raises(ValueError) as error:
        ElasticTrainer(parameters(), optimizer)
    return str(error.value)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=["2"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("sgld", "rank 0 has optimizer SGD, rank 1 has optimizer SGLD"),
        ("sgd", "rank 0 has optimizer's momentum 0.5, rank 1 has optimizer's momentum 0.25"),
    ],
)
def test_ranks_with_other_optimizers_are_an_error_on_all(
    pools: Pools, shape: Shape, other: str, message: str
) -> None:
    said = pools.get(shape).run(_differing, other)
    assert len(set(said)) == 1 and message in said[0], said


class _NoMaster(mx.optimizer.Optimizer):
    """Of a script: half-precision weights whose masters nobody finds."""

    def create_state_multi_precision(self, index: int, weight: Any) -> None:
        return None

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        self._update_count(index)


class _OwnMaster(mx.optimizer.Optimizer):
    """Of a script: keeps masters in its own way."""

    def create_state_multi_precision(self, index: int, weight: Any) -> Any:
        return {"master": weight.astype("float32")}

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        self._update_count(index)
        state["master"][:] -= self.lr * grad.astype("float32")
        mx.nd.cast(state["master"], dtype="float16", out=weight)


def _loaded_over_own_masters() -> List[float]:
    """Weights after a step, after loading others, and after a further step."""
    from gluon_esgd import ElasticTrainer

    param = gluon.Parameter("w", shape=(3,), dtype="float16")
    param.initialize(mx.init.One())
    optimizer = _OwnMaster(multi_precision=True, learning_rate=0.25)
    trainer = ElasticTrainer([param], optimizer)
    seen = []
    for loaded in (None, 3.0):
        if loaded is not None:
            param.set_data(mx.nd.ones(3, dtype="float16") * loaded)
            trainer.reset_center()
        with autograd.record():
            loss = param.data().sum()
        loss.backward()
        trainer.step(1)
        seen.append(float(param.data().asnumpy()[0]))
    trainer.finish()
    return seen


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=["mpi"])
def test_loaded_weights_reach_masters_of_a_foreign_class(pools: Pools, shape: Shape) -> None:
    assert pools.get(shape).run(_loaded_over_own_masters) == [[0.75, 2.75]] * 2


def _without_master() -> Tuple[int, str]:
    """At which step, and what, an exchange says that cannot be made."""
    from gluon_esgd import ElasticTrainer

    param = gluon.Parameter("w", shape=(3,), dtype="float16")
    param.initialize(mx.init.One())
    trainer = ElasticTrainer([param], _NoMaster(multi_precision=True), interval=2)
    for step in range(1, 4):
        with autograd.record():
            loss = (param.data() * param.data()).sum()
        loss.backward()
        try:
            trainer.step(1)
        except ValueError as error:
            return step, str(error)
    return 0, ""


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, 2, 1, "esgd")], ids=["esgd"])
def test_a_master_that_is_not_found_is_an_error_on_all_ranks(pools: Pools, shape: Shape) -> None:
    said = pools.get(shape).run(_without_master)
    assert len(set(said)) == 1
    step, text = said[0]
    assert step == 2 and "optimizer '_NoMaster', parameter 'w'" in text


SCRIPT = """
import logging, sys
import mxnet as mx
from mxnet import autograd, gluon
from gluon_esgd import ElasticTrainer, world

class Mine(mx.optimizer.SGD):  # of the script: no server could import it
    def update_multi_precision(self, index, weight, grad, state):
        super().update_multi_precision(index, weight, [g * 2 for g in grad], state)

assert Mine.__module__ == "__main__"
logging.basicConfig(stream=sys.stdout)
for on_kvstore in (False, True):
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.Zero())
    trainer = ElasticTrainer(net.collect_params(), Mine(learning_rate=0.5),
                             kvstore="dist_async", update_on_kvstore=on_kvstore)
    for _ in range(3):
        with autograd.record():
            loss = net(mx.nd.ones((1, 2))).sum()
        loss.backward()
        trainer.step(1)
    trainer.finish()
    with trainer.center(sync=True):
        print(f"CENTER {world().client} {trainer.rule} {net.weight.data().asnumpy().tolist()}")
"""


@pytest.mark.servers
def test_a_script_with_its_own_optimizer_and_dist_async(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ["-n", "2", "--clients", "2", "--servers", "1", "--job-dir", str(tmp_path / "job")]
    done = subprocess.run(
        [sys.executable, "-m", "gluon_esgd.launch", *flags, sys.executable, str(script)],
        env=environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=110,
    )
    said = done.stdout.decode()
    assert done.returncode == 0, said
    lines = [line.split("CENTER ")[1] for line in said.splitlines() if "CENTER" in line]
    # The changes of both clients add up: 2 clients, 3 steps, rate 0.5, the gradient 1 taken twice.
    assert sorted(lines) == [f"{k} asgd [[-6.0, -6.0]]" for k in (0, 0, 1, 1)], said
    assert said.count("the optimizer runs on the workers all the same") == 1, said
