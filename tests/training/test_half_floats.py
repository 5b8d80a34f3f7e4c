"""Half floats between machines in training: as far from plain Gluon as rounding makes it."""

from __future__ import annotations

from typing import List, Optional, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from ..pool import Pools, Shape, label
from .problems import STEPS, train_alone, train_shared

NODES = (("GLUON_ESGD_NODES", "1,1"),)
HALF_FLOATS = (*NODES, ("GLUON_ESGD_COMPRESSION", "fp16"))
ADAM, SGD = ("adam", {"learning_rate": 0.01}), ("sgd", {"learning_rate": 0.1, "momentum": 0.9})


def _train(optimizer: str, settings: dict, sizes: Optional[List[int]]) -> Tuple:
    from gluon_esgd import world

    before = world().comm.sent_bytes
    weights, digests = train_shared(optimizer, settings, sizes)
    return weights, digests, world().comm.sent_bytes - before


@pytest.mark.mpi
@pytest.mark.parametrize("sizes", [None, [5, 7]], ids=["even", "uneven"])
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("shape", [Shape(2, settings=HALF_FLOATS)], ids=label)
def test_replicas_are_alike_and_near_to_plain_gluon(
    pools: Pools, shape: Shape, optimizer: Tuple[str, dict], sizes: Optional[List[int]]
) -> None:
    full = pools.get(Shape(2, settings=NODES)).run(_train, *optimizer, sizes)
    half = pools.get(shape).run(_train, *optimizer, sizes)
    assert half[0][1] == half[1][1], "the same bits after every step"
    assert half[0][1][0] != full[0][1][0], "nothing was rounded"
    # Gradients lie on lines of 16; to them come a power of two for each half, and a tail.
    assert half[0][2] == STEPS * (2 * (96 + 16 + 48 + 16) + 2 * 4 + 2 * 4)
    alone = train_alone(*optimizer)
    far = [np.abs(result[0][0] - alone).max() / np.abs(alone).max() for result in (full, half)]
    # A step changes by 2^-10 of itself at most, twice rounded; Adam's depends on signs too.
    assert far[0] < 1e-5 and far[1] < 2.0**-9


def _count_samples(batch_size: int) -> List[float]:
    """Gradients that half floats hold exactly, over a number of samples that they do not."""
    from gluon_esgd import ElasticTrainer, world

    net = gluon.nn.Dense(1, in_units=4, use_bias=False)
    net.initialize(mx.init.Zero())
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    for _ in range(2):
        with autograd.record():
            loss = net(mx.nd.ones((1, 4))).sum() * 2.0**12
        loss.backward()
        trainer.step(batch_size + world().worker_rank)
    trainer.finish()
    return net.weight.data().asnumpy().ravel().tolist()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2, settings=HALF_FLOATS), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 1, "sgd", settings=HALF_FLOATS), marks=pytest.mark.servers),
    ],
    ids=["mpi", "two-clients"],
)
def test_samples_are_counted_exactly(pools: Pools, shape: Shape) -> None:
    batch, n = 4097, shape.workers
    samples = sum(batch + rank for rank in range(n))
    right = -2 * n * 2.0**12 / samples
    for weights in pools.get(shape).run(_count_samples, batch):
        np.testing.assert_allclose(weights, right, rtol=1e-6)


def _half_precision_weights() -> Tuple[np.ndarray, int]:
    """Gradients that are half floats already travel as they are."""
    from gluon_esgd import ElasticTrainer, world

    weight = gluon.Parameter("w", shape=(5,), dtype="float16", init=mx.init.One())
    weight.initialize()
    settings = {"learning_rate": 0.5, "multi_precision": True}
    trainer = ElasticTrainer([weight], "sgd", settings)
    before = world().comm.sent_bytes
    for _ in range(2):
        weight.grad()[:] = 1 + world().rank
        weight.data()._fresh_grad = True
        trainer.step(1)
    trainer.finish()
    return weight.data().asnumpy(), world().comm.sent_bytes - before


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2, settings=HALF_FLOATS)], ids=label)
def test_half_precision_weights_train_with_the_option(pools: Pools, shape: Shape) -> None:
    for weight, sent in pools.get(shape).run(_half_precision_weights):
        assert (weight == 1 - 2 * 0.5 * 1.5).all() and sent > 0
