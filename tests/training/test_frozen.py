"""What is frozen stays as it is, to the bit, through exchanges of clients that differ."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np
import pytest

from ..pool import Pools, Shape, label
from .problems import batches, flat, network, train_step

pytestmark = pytest.mark.servers

STEPS, INTERVAL, FROM = 26, 2, 6


def _freeze(layer: Any, how: str) -> None:
    layer.collect_params().setattr(*{"grad_req": ("grad_req", "null"), "lr_mult": (how, 0)}[how])


def _seen(trainer: Any, net: Any) -> Tuple[np.ndarray, np.ndarray]:
    """The center's first layer and last layer; all clients are here, nothing is in flight."""
    with trainer.center(sync=True):
        return flat(net[0]), flat(net[1])


def _train(how: str, from_the_start: bool, lazy: int) -> Tuple[np.ndarray, ...]:
    """Own first layer and the center's, when it was frozen and at the end; how the last moved."""
    from gluon_esgd import ElasticTrainer, world

    net = network()
    if from_the_start:
        _freeze(net[0], how)
    settings = {"interval": INTERVAL, "lazy": lazy, "alpha": 0.3}
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.3}, **settings)
    mine = slice(world().worker_rank, None, world().num_workers)
    for i, (x, y) in enumerate(zip(*batches(STEPS))):
        if i == FROM:
            before = _seen(trainer, net)
            _freeze(net[0], how)
            own = flat(net[0])
        train_step(net, trainer, x[mine], y[mine])
    trainer.finish()
    assert trainer.counters.exchanges >= 10
    after = _seen(trainer, net)
    return own, flat(net[0]), before[0], after[0], after[1] - before[1]


SHAPES = [Shape(4, 2, 1, "esgd"), Shape(4, 2, 1, "asgd")]


@pytest.mark.parametrize("lazy", [0, 1])
@pytest.mark.parametrize("from_the_start", [True, False], ids=["from-the-start", "in-mid-run"])
@pytest.mark.parametrize("how", ["grad_req", "lr_mult"])
@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_frozen_parameters_pass_exchanges_unchanged(
    pools: Pools, shape: Shape, how: str, from_the_start: bool, lazy: int
) -> None:
    results = pools.get(shape).run(_train, how, from_the_start, lazy)
    for own, own_after, center, center_after, moved in results:
        np.testing.assert_array_equal(own_after, own)
        np.testing.assert_array_equal(center_after, center)
        assert np.abs(moved).max() > 1e-3, "what is not frozen is exchanged"
    (first, *_), (other, *_) = results[0], results[2]
    start = flat(network()[0])
    if from_the_start:
        np.testing.assert_array_equal(first, start)
        np.testing.assert_array_equal(results[0][3], start)
    elif shape.rule == "esgd":
        assert (first != other).any(), "clients had come to values of their own"
