"""`no_sync`: gradients that add up before ranks meet."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.contrib import amp

from gluon_esgd import ElasticTrainer

from ..pool import Pools, Shape, label
from .problems import BATCH, batches, digest, flat, network, shares
from .shapes import ANY_RANKS, of_rules

SETTINGS = {"learning_rate": 0.1, "momentum": 0.9}
UPDATES = 5


def adding(ctx: Any = None, seed: int = 0) -> gluon.nn.HybridSequential:
    """A network whose gradients add up."""
    net = network(seed, ctx=ctx)
    net.collect_params().setattr("grad_req", "add")
    return net


def backward(net: Any, x: np.ndarray, y: np.ndarray, scaled: Any = None) -> None:
    contexts = net[0].weight.list_ctx()
    parts = gluon.utils.split_and_load(mx.nd.array(x), contexts, even_split=False)
    labels = gluon.utils.split_and_load(mx.nd.array(y), contexts, even_split=False)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    with autograd.record():
        losses = [loss_of(net(a), b) for a, b in zip(parts, labels)]
        if scaled is not None:
            with amp.scale_loss(losses, scaled) as losses:
                autograd.backward(losses)
                return
    autograd.backward(losses)


def use_loss_scale(trainer: Any) -> None:
    """What amp.init_trainer does, without amp.init, which changes all operators for good."""
    trainer._amp_loss_scaler = amp.loss_scaler.LossScaler()
    trainer._amp_original_scale = trainer._scale


def accumulate(
    net: Any, trainer: Any, x: np.ndarray, y: np.ndarray, pieces: Sequence[slice], scaled: Any
) -> None:
    """One update from several pieces of a batch."""
    for piece in pieces[:-1]:
        with trainer.no_sync():
            backward(net, x[piece], y[piece], scaled)
            trainer.step(len(x[piece]))
    backward(net, x[pieces[-1]], y[pieces[-1]], scaled)
    trainer.step(len(x[pieces[-1]]))
    net.collect_params().zero_grad()


def ours(pieces: Sequence[slice], devices: int, use_amp: bool, **kwargs: Any) -> Tuple[Any, ...]:
    net = adding([mx.cpu(i) for i in range(devices)])
    trainer = ElasticTrainer(net.collect_params(), "sgd", dict(SETTINGS), **kwargs)
    if use_amp:
        use_loss_scale(trainer)
    for x, y in zip(*batches(UPDATES)):
        accumulate(net, trainer, x, y, pieces, trainer if use_amp else None)
    return flat_of_all(net), trainer.counters.steps


def flat_of_all(net: Any) -> np.ndarray:
    arrays = [d.asnumpy().ravel() for p in net.collect_params().values() for d in p.list_data()]
    return np.concatenate(arrays)


def plain(pieces: Sequence[slice], devices: int, use_amp: bool) -> np.ndarray:
    """The same with ``gluon.Trainer``, which accumulates by not being called."""
    net = adding([mx.cpu(i) for i in range(devices)])
    trainer = gluon.Trainer(net.collect_params(), "sgd", dict(SETTINGS))
    if use_amp:
        use_loss_scale(trainer)
    for x, y in zip(*batches(UPDATES)):
        for piece in pieces:
            backward(net, x[piece], y[piece], trainer if use_amp else None)
        trainer.step(sum(len(x[piece]) for piece in pieces))
        net.collect_params().zero_grad()
    return flat_of_all(net)


@pytest.mark.parametrize("use_amp", [False, True], ids=["plain", "amp"])
@pytest.mark.parametrize("devices", [1, 2])
def test_alone_it_is_gluon_with_the_total_to_the_bit(devices: int, use_amp: bool) -> None:
    pieces = shares(BATCH, [1, 3, 2])
    weights, steps = ours(pieces, devices, use_amp)
    np.testing.assert_array_equal(weights, plain(pieces, devices, use_amp))
    assert steps == UPDATES


def _accumulated(
    sizes: List[List[int]], devices: int, use_amp: bool, **kwargs: Any
) -> Tuple[np.ndarray, List[str], Dict[str, float]]:
    """Every rank cuts its share of each batch into other pieces."""
    from gluon_esgd import world

    net = adding([mx.cpu(i) for i in range(devices)], seed=world().rank)
    trainer = ElasticTrainer(net.collect_params(), "sgd", dict(SETTINGS), **kwargs)
    if use_amp:
        use_loss_scale(trainer)
    mine = sizes[world().worker_rank]
    own = shares(BATCH, [sum(s) for s in sizes])[world().worker_rank]
    digests = []
    for x, y in zip(*batches(UPDATES)):
        x, y = x[own], y[own]
        before = trainer.counters.collective_bytes
        accumulate(net, trainer, x, y, shares(len(x), mine), trainer if use_amp else None)
        mx.nd.waitall()
        assert trainer.counters.collective_bytes > before
        digests.append(digest(net))
    trainer.finish()
    return flat(net), digests, trainer.counters.as_dict()


@pytest.mark.parametrize("use_amp", [False, True], ids=["plain", "amp"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 2, "sgd"), marks=pytest.mark.servers),
    ],
    ids=["mpi", "sgd"],
)
def test_uneven_counts_make_the_mean_over_all_samples(
    pools: Pools, shape: Shape, devices: int, use_amp: bool
) -> None:
    # Relative sizes of what each rank accumulates, 24 in all.
    sizes = {2: [[2, 4, 4], [12, 2]], 4: [[2, 2], [2, 4, 2], [4], [6, 2]]}[shape.workers]
    expected = plain([slice(None)], 1, False)
    for weights, digests, counters in pools.get(shape).run(_accumulated, sizes, devices, use_amp):
        np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=1e-6)
        assert len(set(digests)) == UPDATES and counters["steps"] == UPDATES


@pytest.mark.servers
@pytest.mark.parametrize("shape", of_rules(4, 2, 1), ids=label)
def test_exchanges_count_updates_and_not_what_was_counted(pools: Pools, shape: Shape) -> None:
    sizes = [[1, 1, 1], [3, 1, 2], [2, 2], [4, 3]]
    results = pools.get(shape).run(_interval_of_two, sizes)
    for digests, exchanges in results:
        # Steps 2 and 4 of five, and the last one when it finishes.
        assert exchanges == 3 and len(digests) == UPDATES
    assert results[0] == results[1] and results[2] == results[3]


def _interval_of_two(sizes: List[List[int]]) -> Tuple[List[str], int]:
    _, digests, counters = _accumulated(sizes, 1, False, interval=2, lazy=1)
    return digests, int(counters["exchanges"])


def _counted_only() -> Dict[str, Any]:
    """One rank counts more often than the other: nobody waits for anybody inside."""
    from gluon_esgd import world

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", dict(SETTINGS))
    net.collect_params().setattr("grad_req", "add")  # gradients have moved into buckets before
    x, y = batches()
    before = flat(net)
    with trainer.no_sync():
        for _ in range(1 + 3 * world().rank):
            backward(net, x[0], y[0])
            trainer.step(BATCH)
    mx.nd.waitall()
    grad = net[0].weight.grad().asnumpy()
    seen = {
        "moved": bool((flat(net) != before).any()),
        "bytes": trainer.counters.collective_bytes,
        "steps": trainer.counters.steps,
    }
    backward(net, x[0], y[0])
    trainer.step(BATCH)
    # All gradients are of the same batch: their mean is that of one of them.
    grad /= (1 + 3 * world().rank) * BATCH
    return {**seen, "off": float(np.abs(net[0].weight.grad().asnumpy() - grad).max())}


@ANY_RANKS
def test_inside_nothing_is_communicated_and_nothing_moves(pools: Pools, shape: Shape) -> None:
    for seen in pools.get(shape).run(_counted_only):
        off = seen.pop("off")
        assert seen == {"moved": False, "bytes": 0, "steps": 0} and off < 1e-6


def _trainer(**kwargs: Any) -> Tuple[Any, Any]:
    net = adding()
    return net, ElasticTrainer(net.collect_params(), "sgd", dict(SETTINGS), **kwargs)


def test_a_gradient_that_would_be_overwritten_is_an_error() -> None:
    net, trainer = _trainer()
    net[1].bias.grad_req = "write"
    name = net[1].bias.name
    said = f"'{name}' has grad_req='write'.*overwrite.*'add'"
    with pytest.raises(ValueError, match=said), trainer.no_sync():
        pass
    net[1].bias.grad_req = "null"  # frozen: no gradient to lose
    with trainer.no_sync():
        trainer.step(1)


def test_what_needs_all_ranks_is_refused_inside() -> None:
    _, trainer = _trainer()
    with trainer.no_sync():
        with pytest.raises(RuntimeError, match=r"allreduce_grads\(\) inside .* leave the block"):
            trainer.allreduce_grads()
        with pytest.raises(RuntimeError, match=r"update\(\) inside .* leave the block"):
            trainer.update(1)
        with pytest.raises(RuntimeError, match=r"clip_global_norm\(\) inside .* leave the block"):
            trainer.clip_global_norm(1.0)
        with pytest.raises(TypeError, match="batch_size='4' must be a number"):
            trainer.step("4")
        with pytest.raises(ValueError, match="batch_size=0 must be above 0"):
            trainer.step(0)


def test_only_an_update_forgets_the_count() -> None:
    net, trainer = _trainer()
    x, y = batches()
    with pytest.raises(KeyError), trainer.no_sync():
        with trainer.no_sync():
            trainer.step(3)
        trainer.step(2)
        raise KeyError("of the script")
    backward(net, x[0], y[0])
    first = trainer._params[0].data()
    first._fresh_grad = False
    with pytest.raises(UserWarning):
        trainer.step(4)  # nothing was updated
    first._fresh_grad = True
    trainer.step(4)
    assert trainer._optimizer.rescale_grad == 1 / 9
    backward(net, x[0], y[0])
    trainer.step(4)
    assert trainer._optimizer.rescale_grad == 1 / 4
    with trainer.no_sync():
        trainer.step(4)
    backward(net, x[0], y[0])
    trainer.allreduce_grads()
    trainer.update(4)
    assert trainer._optimizer.rescale_grad == 1 / 8


def _in_center() -> List[str]:
    _, trainer = _trainer()
    with trainer.center(), trainer.no_sync():
        try:
            trainer.step(1)
        except RuntimeError as error:
            return [str(error)]
    return []


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=["2"])
def test_gradients_of_the_center_are_not_counted(pools: Pools, shape: Shape) -> None:
    for (said,) in pools.get(shape).run(_in_center):
        assert "leave `with trainer.center():`" in said
