"""Layouts that oneDNN gives to weights in an evaluation, and training afterwards."""

from __future__ import annotations

from typing import Any, Dict, List

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from ..pool import Pools, Shape, label
from .problems import digest

OPTIMIZERS: Dict[str, Dict[str, Any]] = {
    "nag": {},
    "elasticsgd": {"nesterov": True},
    "sgd": {},
}


def _evaluated_in_between(optimizer: str, settings: Dict[str, Any]) -> List[str]:
    """Digests after every step. A large wd shows which weight the momentum was made from."""
    from gluon_esgd import ElasticTrainer, world

    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(*(gluon.nn.Conv2D(16, 3, padding=1, in_channels=n) for n in (3, 16, 16)))
    net.initialize(mx.init.Xavier())
    settings = {"learning_rate": 0.02, "momentum": 0.9, "wd": 0.1, **settings}
    trainer = ElasticTrainer(net.collect_params(), optimizer, settings)
    random = np.random.RandomState(world().worker_rank)
    digests = []
    for _ in range(6):
        net(mx.nd.array(random.rand(2, 3, 16, 16))).asnumpy()
        for _ in range(4):
            with autograd.record():
                loss = (net(mx.nd.array(random.rand(2, 3, 16, 16))) ** 2).mean()
            loss.backward()
            if world().rank == 0:
                mx.nd.waitall()  # ranks are never at the same point of their engines
            trainer.step(1)
            digests.append(digest(net))
    return digests


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replicas_stay_equal_after_an_evaluation(
    pools: Pools, shape: Shape, optimizer: str
) -> None:
    first, second = pools.get(shape).run(_evaluated_in_between, optimizer, OPTIMIZERS[optimizer])
    assert first == second
