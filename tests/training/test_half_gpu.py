"""Whole networks in float16, and AMP, on GPUs."""

from __future__ import annotations

from typing import List

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.contrib import amp

from gluon_esgd import ElasticTrainer

from ..pool import Pools, Shape, label, run_once
from .problems import BATCH, batches, digest, flat, make_trainer, network, own_share

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not mx.context.num_gpus():
        pytest.skip("MXNet finds no GPU")


def _gpu(rank: int) -> mx.Context:
    return mx.gpu(rank % mx.context.num_gpus())


def _train_half(trainer_class: type, ctx: mx.Context, share: slice) -> List[np.ndarray]:
    """Weights after every step of a float16 network with float32 masters."""
    net = network(ctx=ctx)
    net.cast("float16")
    settings = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
    trainer = trainer_class(net.collect_params(), "sgd", settings)
    loss_of, seen = gluon.loss.SoftmaxCrossEntropyLoss(), []
    for x, y in zip(*batches()):
        data = mx.nd.array(x[share], ctx=ctx, dtype="float16")
        with autograd.record():
            out = net(data).astype("float32")
            loss = loss_of(out, mx.nd.array(y[share], ctx=ctx))
        loss.backward()
        trainer.step(data.shape[0])
        seen.append(flat(net).astype(np.float32))
    return seen


def _share_of_half() -> List[np.ndarray]:
    from gluon_esgd import world

    half = BATCH // 2
    share = slice(world().rank * half, (world().rank + 1) * half)
    return _train_half(ElasticTrainer, _gpu(world().rank), share)


def test_a_half_network_alone_is_as_in_gluon() -> None:
    everything = slice(0, BATCH)
    ours = _train_half(ElasticTrainer, mx.gpu(0), everything)
    np.testing.assert_array_equal(ours, _train_half(gluon.Trainer, mx.gpu(0), everything))


@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_a_half_network_over_two_ranks(pools: Pools, shape: Shape) -> None:
    first, second = pools.get(shape).run(_share_of_half)
    np.testing.assert_array_equal(first, second)
    alone = _train_half(gluon.Trainer, mx.gpu(0), slice(0, BATCH))
    np.testing.assert_allclose(first[-1], alone[-1], atol=0.02)


def _train_with_amp() -> None:
    """Casts by AMP, and an overflow on rank 1 in one step."""
    from gluon_esgd import world

    amp.init()
    ctx = _gpu(world().rank)
    net = network(ctx=ctx)
    trainer = make_trainer(net)
    amp.init_trainer(trainer)
    loss_of, seen = gluon.loss.SoftmaxCrossEntropyLoss(), []
    for step, (x, y) in enumerate(zip(*batches())):
        times = np.inf if step == 5 and world().rank == 1 else 1.0
        x, y = own_share(x), own_share(y)
        with autograd.record():
            out = net(mx.nd.array(x, ctx=ctx))
            loss = loss_of(out.astype("float32"), mx.nd.array(y, ctx=ctx)) * times
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(len(x))
        seen.append(digest(net))
    assert np.isfinite(flat(net)).all() and seen[5] == seen[4] != seen[6]
    print(f"\nAMP {out.dtype.__name__} {seen[-1]}\n")
    trainer.finish()


@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_amp_over_two_ranks(shape: Shape) -> None:
    ended = run_once(shape, _train_with_amp, timeout=110)
    assert ended.code == 0, ended.output
    said = [line.split("AMP ")[1] for line in ended.output.splitlines() if "AMP " in line]
    assert len(said) == 2 and len(set(said)) == 1 and said[0].startswith("float16"), said
