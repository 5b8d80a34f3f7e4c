"""Half floats to the servers in whole jobs: the error, the bytes, and who must agree."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd.optim import Outer
from gluon_esgd.policy import Policy

from ..pool import Pools, Shape, label
from .problems import (
    batches,
    digest,
    flat,
    network,
    own_share,
    shares,
    solve_regression,
    train_alone,
    train_step,
)

FP16 = (("GLUON_ESGD_COMPRESSION", "fp16"),)
STEPS = 20
SGD = {"learning_rate": 0.1, "momentum": 0.9}

ROUNDS = [Shape(2, 2, 1, "sgd", settings=FP16), Shape(4, 2, 2, "sgd", settings=FP16)]


@pytest.mark.servers
@pytest.mark.parametrize("shape", ROUNDS, ids=label)
def test_twenty_steps_of_sgd_come_near_float32(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_train)
    expected = train_alone("sgd", SGD)
    start = flat(network())
    for weights, digests, _ in results:
        assert digests == results[0][1]  # all workers alike, after each step
        error = np.linalg.norm(weights - expected)
        assert error < 1e-3 * np.linalg.norm(expected - start)  # docs/algorithms.md says 2e-4
        assert error > 1e-7 * np.linalg.norm(expected)  # or it was not compressed


def _train() -> Tuple[np.ndarray, List[str], int]:
    from gluon_esgd import ElasticTrainer, world

    net = network(seed=world().rank)
    trainer = ElasticTrainer(net.collect_params(), "sgd", dict(SGD))
    mine = shares(24, [1] * world().num_workers)[world().worker_rank]
    digests = []
    for x, y in zip(*batches(STEPS)):
        train_step(net, trainer, x[mine], y[mine])
        digests.append(digest(net))
    trainer.finish()
    return flat(net), digests, trainer.counters.server_bytes


@pytest.mark.servers
@pytest.mark.parametrize(
    ("shape", "of_a_float"), [(ROUNDS[0], 2), (Shape(2, 2, 1, "sgd"), 4)], ids=["half", "whole"]
)
def test_half_the_bytes_of_a_round(pools: Pools, shape: Shape, of_a_float: int) -> None:
    floats = flat(network(hidden=64)).size
    for bucket, moved in pools.get(shape).run(_bytes_of_a_round):
        assert moved == 2 * (of_a_float * (bucket - 2) + 4 * 2) and bucket - 2 >= floats


def _bytes_of_a_round() -> Tuple[int, int]:
    from gluon_esgd import ElasticTrainer

    net = network(hidden=64)
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    seen = []
    for x, y in zip(*batches(3)):
        train_step(net, trainer, own_share(x), own_share(y))
        mx.nd.waitall()
        seen.append(trainer._replica._rounds.server_bytes)
    trainer.finish()
    (bucket,) = trainer._replica._round_lengths
    return bucket, seen[2] - seen[1]


@pytest.mark.servers
@pytest.mark.parametrize("shape", ROUNDS[:1], ids=label)
def test_counts_of_samples_are_exact(pools: Pools, shape: Shape) -> None:
    for change in pools.get(shape).run(_odd_batches):
        np.testing.assert_allclose(change, -2 * 2048 / (4099 + 4100), rtol=1e-6)


def _odd_batches() -> np.ndarray:
    from gluon_esgd import ElasticTrainer, world

    net = gluon.nn.Dense(3, in_units=2, use_bias=False)
    net.initialize(mx.init.Zero())
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 1})
    with mx.autograd.record():
        loss = net(mx.nd.full((2048, 2), 1)).sum()
    loss.backward()
    trainer.step(4099 + world().client)
    trainer.finish()
    return flat(net)


CENTERED = [
    ("esgd", Shape(2, 2, 1, "esgd", settings=FP16), {"interval": 4}),
    ("esgd", Shape(4, 2, 2, "esgd", settings=FP16), {"interval": 8, "lazy": 3}),
    ("asgd", Shape(2, 2, 2, "asgd", settings=FP16), {}),
]


@pytest.mark.servers
@pytest.mark.parametrize(
    ("rule", "shape", "settings"), CENTERED, ids=[label(s) for _, s, _ in CENTERED]
)
def test_rules_reach_the_minimum_of_a_convex_problem(
    pools: Pools, rule: str, shape: Shape, settings: Dict[str, Any]
) -> None:
    results = pools.get(shape).run(_solve, rule, settings)
    for own, center, truth in results:
        np.testing.assert_array_equal(center, results[0][1])
        # One step of half floats, relative to the weights.
        np.testing.assert_allclose(own, center, rtol=2e-3, atol=1e-3)
        np.testing.assert_allclose(center, truth, rtol=2e-3, atol=1e-3)


def _solve(rule: str, settings: Dict[str, Any]) -> Any:
    return solve_regression(rule, 200, 0.1, **settings)


@pytest.mark.servers
def test_the_trainers_own_argument(pools: Pools) -> None:
    shape = Shape(2, 2, 1, "esgd", settings=(("GLUON_ESGD_START_TIMEOUT_S", "118"),))
    for half, whole in pools.get(shape).run(_bytes_of_an_exchange, {"type": "fp16"}):
        assert half == whole / 2


def _bytes_of_an_exchange(compression: Any) -> Tuple[int, int]:
    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, compression_params=compression,
        interval=1,
    )  # fmt: skip
    x, y = (array[0] for array in batches(1))
    train_step(net, trainer, x, y)
    trainer._replica._exchange.flush()
    before = trainer.counters.server_bytes
    train_step(net, trainer, x, y)
    trainer._replica._exchange.flush()
    moved = trainer.counters.server_bytes - before
    trainer.finish()
    return moved, 2 * 4 * flat(net).size


@pytest.mark.servers
@pytest.mark.parametrize("shape", [CENTERED[0][1]], ids=label)
def test_what_half_floats_lack_is_said_and_moves_nothing(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_far_away)
    for before, after, _ in results:  # what is left is the rounding of the other client's
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-3)
    (said,), nothing = (texts for _, _, texts in results)
    assert not nothing
    assert said.startswith("client 0: weights that are not finite, or further from it than half")


def _far_away() -> Tuple[np.ndarray, np.ndarray, List[str]]:
    import logging

    from gluon_esgd import ElasticTrainer, world

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0}, interval=1)
    x, y = (array[0] for array in batches(1))
    train_step(net, trainer, x, y)
    with trainer.center(sync=True):
        before = flat(net)
    if world().client == 0:
        weight = next(iter(net.collect_params().values()))
        weight.set_data(weight.data() + 1e6)
    texts: List[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gluon_esgd.exchange").addHandler(handler)
    train_step(net, trainer, x, y)
    trainer._replica._exchange.flush()
    logging.getLogger("gluon_esgd.exchange").removeHandler(handler)
    with trainer.center(sync=True):
        after = flat(net)
    trainer.finish()
    return before, after, texts


def test_clients_compare_momentum_and_compression() -> None:
    def contract(**more: Any) -> Dict[str, int]:
        return Policy("esgd", 1, 0.1, 1, **more).contract()

    assert contract() == contract(outer=Outer(0.0, 1.0))
    assert all(0 <= value < 1 << 24 for value in contract().values())
    for more in ({"compression": "fp16"}, {"outer": Outer(0.9)}, {"outer": Outer(0.0, 0.9)}):
        other = contract(**more)
        assert set(other) == set(contract())
        assert sum(other[name] != value for name, value in contract().items()) == 1


def test_alone_there_is_nothing_to_compress() -> None:
    from gluon_esgd import ElasticTrainer

    contexts = [mx.cpu(0), mx.cpu(1)]  # Gluon's own store would refuse the type
    net = network(ctx=contexts)
    trainer = ElasticTrainer(net.collect_params(), "sgd", compression_params={"type": "fp16"})
    for context in contexts:
        with mx.autograd.record():
            loss = net(mx.nd.ones((2, 6), ctx=context)).sum()
        loss.backward()
    trainer.step(4)
