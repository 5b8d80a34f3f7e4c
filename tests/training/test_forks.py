"""Forking between steps, with collectives pending in the engine, neither hangs nor harms."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from ..pool import Pools, Shape, label
from .problems import batches, digest, network, train_step

ANY = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 1, "esgd"), marks=pytest.mark.servers),
    ],
    ids=label,
)


def _trained(between: str) -> Tuple[str, int]:
    from gluon_esgd import ElasticTrainer, world

    net = network(hidden=256)
    kwargs = {"interval": 2} if world().settings.num_servers else {}
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, **kwargs)
    x, y = batches()
    done = 0
    for i in range(12):
        train_step(net, trainer, x[i], y[i])
        if i % 3 == 0:
            done += globals()[between](x[i], y[i])
    trainer.finish()
    return digest(net), done


def _loader(x: np.ndarray, y: np.ndarray) -> int:
    dataset = gluon.data.ArrayDataset(x, y)
    loader = gluon.data.DataLoader(dataset, batch_size=8, num_workers=2)
    return sum(len(a) for a, _ in loader)


def _subprocess(_: np.ndarray, __: np.ndarray) -> int:
    done = subprocess.run([sys.executable, "-c", "print(24)"], capture_output=True)
    plain = subprocess.Popen([sys.executable, "-c", ""], preexec_fn=os.getpid)
    assert plain.wait(30) == 0
    return int(done.stdout)


def _fork(_: np.ndarray, __: np.ndarray) -> int:
    child = os.fork()
    if child == 0:
        ok = (mx.nd.ones((3,)) * 2).asnumpy().sum() == 6
        os._exit(24 if ok else 1)
    return os.waitpid(child, 0)[1] >> 8


@ANY
@pytest.mark.parametrize("between", ["_loader", "_subprocess", "_fork"])
def test_forks_between_steps(pools: Pools, shape: Shape, between: str) -> None:
    results = pools.get(shape).run(_trained, between)
    assert {done for _, done in results} == {4 * 24}
    if shape.clients == 1:
        assert len({d for d, _ in results}) == 1


def _train_in_child() -> int:
    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x, y = batches()
    train_step(net, trainer, x[0], y[0])
    child = os.fork()
    if child == 0:
        try:
            train_step(net, trainer, x[1], y[1])
        except RuntimeError as error:
            os._exit(7 if "train in the process that made the trainer" in str(error) else 8)
        os._exit(9)
    code = os.waitpid(child, 0)[1] >> 8
    train_step(net, trainer, x[1], y[1])
    trainer.finish()
    return code


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=lambda s: s.workers)
def test_training_in_a_forked_child_is_refused(pools: Pools, shape: Shape) -> None:
    assert pools.get(shape).run(_train_in_child) == [7, 7]
