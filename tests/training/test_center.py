"""What the network holds inside and after the center, and what moves it."""

from __future__ import annotations

from typing import Any, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from ..pool import Pools, Shape
from .problems import batches, digest, flat, make_trainer, network, own_share, train_step
from .shapes import ANY_RANKS, ESGD, ESGD_ASGD


class _Normed(gluon.nn.HybridSequential):
    def __init__(self) -> None:
        super().__init__()
        self.add(
            gluon.nn.Dense(8, in_units=6),
            gluon.nn.BatchNorm(in_channels=8),
            gluon.nn.Dense(3, in_units=8),
        )


def _center() -> Tuple[np.ndarray, float, bool, str]:
    from gluon_esgd import world

    net = _Normed()
    net.initialize()
    trainer = make_trainer(net, **({"interval": 4} if world().num_clients > 1 else {}))
    random = np.random.RandomState(world().worker_rank)
    probe = mx.nd.array(np.random.RandomState(5).randn(7, 6))
    for _ in range(10):
        x = random.randn(8, 6).astype("f") * (1 + world().worker_rank)
        train_step(net, trainer, x, random.randint(0, 3, 8))
    own = flat(net)
    with trainer.center(sync=True):
        seen = net(probe).asnumpy()
        variance = min(float(p.data().min().asscalar()) for n, p in _variances(net))
        try:
            train_step(net, trainer, x, random.randint(0, 3, 8))
            said = ""
        except RuntimeError as error:
            said = str(error)
    restored = bool((flat(net) == own).all())
    trainer.finish()
    return seen, variance, restored, said


def _variances(net: Any) -> List[Tuple[str, Any]]:
    return [(n, p) for n, p in net.collect_params().items() if n.endswith("running_var")]


@ANY_RANKS
def test_center_gives_one_result_on_all_ranks_and_own_weights_come_back(
    pools: Pools, shape: Shape
) -> None:
    results = pools.get(shape).run(_center)
    for seen, variance, restored, said in results:
        np.testing.assert_array_equal(seen, results[0][0])
        assert variance >= 0 and restored
        assert "leave `with trainer.center():` before training on" in said


def _frozen() -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    from gluon_esgd import world

    net = network()
    layers = list(net._children.values())
    layers[0].weight.grad_req = "null"
    layers[0].bias.lr_mult = 0
    trainer = make_trainer(net, **({"interval": 2} if world().num_clients > 1 else {}))
    for x, y in zip(*batches()):
        train_step(net, trainer, own_share(x), own_share(y))
    trainer.finish()
    own = layers[0].weight.data().asnumpy(), layers[0].bias.data().asnumpy()
    with trainer.center():
        centers = layers[0].weight.data().asnumpy(), layers[0].bias.data().asnumpy()
    start = network()[0]
    expected = start.weight.data().asnumpy(), start.bias.data().asnumpy()
    return tuple(np.concatenate([a.ravel() for a in part]) for part in (own, centers, expected))


@ANY_RANKS
def test_frozen_parameters_stay_frozen(pools: Pools, shape: Shape) -> None:
    for own, center, expected in pools.get(shape).run(_frozen):
        np.testing.assert_array_equal(own, expected)
        np.testing.assert_array_equal(center, expected)


def _short_run() -> Tuple[int, float]:
    from gluon_esgd import world

    net = network()
    trainer = make_trainer(net, interval=64)
    x, y = batches()
    for i in range(3):
        train_step(net, trainer, x[i + world().client], y[i + world().client])
    trainer.finish()
    with trainer.center():
        moved = float(np.abs(flat(net) - flat(network())).max())
    return trainer.counters.exchanges, moved


@ESGD
def test_a_run_shorter_than_the_interval_has_a_center(pools: Pools, shape: Shape) -> None:
    for exchanges, moved in pools.get(shape).run(_short_run):
        assert exchanges == 1 and moved > 0


def _reset() -> Tuple[float, float]:
    net = network()
    trainer = make_trainer(net, interval=2)
    for x, y in zip(*batches(6)):
        train_step(net, trainer, own_share(x), own_share(y))
    for param in net.collect_params().values():
        param.set_data(mx.nd.ones(param.shape) * 0.25)
    trainer.reset_center()
    with trainer.center():
        center = flat(net)
    trainer.finish()
    return float(center.min()), float(center.max())


@ESGD_ASGD
def test_reset_center_takes_the_loaded_weights(pools: Pools, shape: Shape) -> None:
    for low, high in pools.get(shape).run(_reset):
        assert low == pytest.approx(0.25, abs=1e-6) and high == pytest.approx(0.25, abs=1e-6)


def _reset_by_leader() -> Tuple[str, float]:
    """Only the leader of client 0 has the new weights."""
    from gluon_esgd import world

    net = network()
    trainer = make_trainer(net)
    x, y = batches()
    train_step(net, trainer, own_share(x[0]), own_share(y[0]))
    if world().is_main:
        for param in net.collect_params().values():
            param.set_data(mx.nd.ones(param.shape) * 5)
    trainer.reset_center()
    reset = digest(net), float(flat(net).min())
    train_step(net, trainer, own_share(x[1]), own_share(y[1]))
    trainer.finish()
    return reset


@ANY_RANKS
def test_reset_center_gives_everybody_the_weights_of_one(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_reset_by_leader)
    assert len(set(results)) == 1 and results[0][1] == 5


def _half_precision() -> Tuple[float, float, float]:
    """fp16 weights, no gradient, clients that start apart: masters are drawn together."""
    from gluon_esgd import ElasticTrainer, world

    param = gluon.Parameter("w", shape=(8,), dtype="float16", init="ones")
    param.initialize()
    settings = {"learning_rate": 0.0, "multi_precision": True, "momentum": 0.9}
    trainer = ElasticTrainer([param], "sgd", settings, interval=1, lazy=0, alpha=0.3)
    for step in range(12):
        if step == 1:
            param.set_data(mx.nd.ones((8,), dtype="float16") * (1 + world().client))
            trainer._updaters[0].states[0][1][:] = 1 + world().client
        for grad, data in zip(param.list_grad(), param.list_data()):
            grad[:] = 0
            data._fresh_grad = True
        trainer.step(1)
        with trainer.center(sync=True):
            pass  # clients keep pace, so that each ends near the same center
    trainer.finish()
    master = trainer._updaters[0].states[0][1].asnumpy()
    own = param.data().asnumpy()
    with trainer.center(sync=True):
        center = float(param.data().asnumpy().mean())
    return float(own.mean()), float(master.mean()), center


@ESGD
def test_exchanges_move_masters_of_half_precision_weights(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_half_precision)
    for own, master, center in results:
        assert own == pytest.approx(master, abs=1e-3)
        assert own == pytest.approx(center, abs=0.02)
    assert results[0][1] != 1 and results[2][1] != 2


def _half_precision_reset() -> Tuple[float, float]:
    """Half-precision weights are loaded in mid-run; masters hold the old ones."""
    from gluon_esgd import ElasticTrainer

    param = gluon.Parameter("w", shape=(8,), dtype="float16", init="ones")
    param.initialize()
    settings = {"learning_rate": 0.1, "multi_precision": True}
    trainer = ElasticTrainer([param], "sgd", settings, interval=64)

    def step(times: int) -> None:
        with mx.autograd.record():
            loss = (param.data() * times).sum()
        loss.backward()
        trainer.step(1)

    step(1)
    param.set_data(mx.nd.ones((8,), dtype="float16") * 4)
    trainer.reset_center()
    step(0)
    own = float(param.data().asnumpy().mean())
    with trainer.center():
        center = float(param.data().asnumpy().mean())
    trainer.finish()
    return own, center


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, 2, 1, "esgd")], ids=["esgd"])
def test_reset_center_reaches_masters(pools: Pools, shape: Shape) -> None:
    assert pools.get(shape).run(_half_precision_reset) == [(4.0, 4.0)] * 4


def _set_on_one_rank() -> List[str]:
    from gluon_esgd import world

    net = network()
    trainer = make_trainer(net)
    x, y = batches()
    for i in range(4):
        train_step(net, trainer, own_share(x[i]), own_share(y[i]))
        if i == 1 and world().rank == 0:
            for param in net.collect_params().values():
                param.set_data(mx.nd.ones(param.shape))
    with trainer.center():
        shown = digest(net)
    own = digest(net)
    trainer.finish()
    return [shown, own, digest(net)]


@ANY_RANKS
def test_ranks_that_parted_are_made_equal_before_results_are_read(
    pools: Pools, shape: Shape
) -> None:
    results = pools.get(shape).run(_set_on_one_rank)
    size = shape.workers // shape.clients
    for first in range(0, shape.workers, size):
        assert results[first : first + size] == [results[first]] * size


def _lost_to_nan() -> Tuple[bool, bool]:
    from gluon_esgd import world

    net = network()
    trainer = make_trainer(net, interval=2)
    x, y = batches()
    for i in range(8):
        scale = np.nan if i == 3 and world().client == 1 else 1
        train_step(net, trainer, own_share(x[i]) * np.float32(scale), own_share(y[i]))
    trainer.finish()
    with trainer.center(sync=True):
        center = bool(np.isfinite(flat(net)).all())
    return bool(np.isfinite(flat(net)).all()), center


@ESGD_ASGD
def test_a_client_lost_to_nan_does_not_take_the_center_with_it(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_lost_to_nan)
    assert [own for own, _ in results] == [True, True, False, False]
    assert all(center for _, center in results)


def _frozen_in_one_client() -> float:
    """Client 0 freezes p for a while in which client 1 adds 5 to it; nobody has a gradient."""
    from gluon_esgd import ElasticTrainer, world

    param = gluon.Parameter("p", shape=(3,), init="zeros")
    param.initialize()
    trainer = ElasticTrainer([param], "sgd", {"learning_rate": 0.0}, interval=1, lazy=0)

    def step() -> None:
        for grad, data in zip(param.list_grad(), param.list_data()):
            grad[:] = 0
            data._fresh_grad = True
        trainer.step(1)

    step()
    if world().client == 0:
        param.lr_mult = 0
    for _ in range(5):
        if world().client == 1:
            param.set_data(param.data() + 1)
        step()
    with trainer.center(sync=True):  # all clients are here
        pass
    step()
    param.lr_mult = 1
    step()
    trainer.finish()
    with trainer.center(sync=True):
        return float(param.data().mean().asscalar())


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, 2, 1, "asgd")], ids=["asgd"])
def test_a_parameter_frozen_in_one_client_keeps_the_work_of_the_other(
    pools: Pools, shape: Shape
) -> None:
    assert pools.get(shape).run(_frozen_in_one_client) == [5.0] * 4


def _frozen_in_flight() -> Tuple[float, float]:
    """Frozen between snapshot and application, and only then."""
    from gluon_esgd import ElasticTrainer, world

    param = gluon.Parameter("p", shape=(3,), init="zeros")
    param.initialize()
    trainer = ElasticTrainer([param], "sgd", {"learning_rate": 0.0}, interval=2, lazy=1)
    for i in range(1, 6):
        if i == 2:
            param.set_data(mx.nd.ones((3,)) * 4 * world().client)
        param.lr_mult = 0 if i == 3 else 1
        for grad, data in zip(param.list_grad(), param.list_data()):
            grad[:] = 0
            data._fresh_grad = True
        trainer.step(1)
    trainer.finish()
    own = float(param.data().mean().asscalar())
    with trainer.center(sync=True):
        return own, float(param.data().mean().asscalar())


@ESGD
def test_freezing_between_snapshot_and_application_loses_nothing(
    pools: Pools, shape: Shape
) -> None:
    results = pools.get(shape).run(_frozen_in_flight)
    assert results[0][0] + results[2][0] + results[0][1] == pytest.approx(4, rel=1e-5)
