"""What holds on all ranks of a client, whatever the order in which things happen."""

from __future__ import annotations

from typing import Any, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from ..pool import Pools, Shape, label
from .problems import batches, digest, flat, network, shares, train_step

ANY_RANKS = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        pytest.param(Shape(3), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 1, "esgd"), marks=pytest.mark.servers),
        pytest.param(Shape(4, 2, 2, "sgd"), marks=pytest.mark.servers),
    ],
    ids=label,
)


def _trainer(net: Any, **kwargs: Any) -> Any:
    from gluon_esgd import ElasticTrainer

    settings = {"learning_rate": 0.1, "momentum": 0.9}
    return ElasticTrainer(net.collect_params(), "sgd", settings, **kwargs)


def _mine(x: np.ndarray) -> np.ndarray:
    from gluon_esgd import world

    return x[shares(len(x), [1] * world().size)[world().rank]]


def _deferred() -> Tuple[str, str]:
    from gluon_esgd import world

    net = network(seed=10 + world().worker_rank, deferred=True)
    trainer = _trainer(net)
    x, y = batches()
    net(mx.nd.array(x[0]))
    first = digest(net)
    train_step(net, trainer, _mine(x[0]), _mine(y[0]))
    trainer.finish()
    return first, digest(net)


@ANY_RANKS
def test_deferred_parameters_are_equal_before_the_first_gradient(
    pools: Pools, shape: Shape
) -> None:
    results = pools.get(shape).run(_deferred)
    size = shape.workers // shape.clients
    for client in range(shape.clients):
        assert len(set(results[client * size : (client + 1) * size])) == 1


def _first_step() -> Tuple[np.ndarray, np.ndarray]:
    from gluon_esgd import world

    net = network(seed=20 + world().worker_rank)
    trainer = _trainer(net)
    before = flat(net)
    x, y = batches()
    train_step(net, trainer, _mine(x[0]), _mine(y[0]))
    after = flat(net)
    trainer.finish()
    return before, after


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, 2, 1, "esgd")], ids=["esgd"])
def test_a_client_that_took_the_center_drops_its_first_gradient(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_first_step)
    seed = results[0][0]
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert not np.array_equal(results[2][0], seed)
    assert not np.array_equal(results[0][1], seed), "client 0 trains from its first step"
    for _, after in results[2:]:
        np.testing.assert_array_equal(after, seed)


def _loaded_late() -> List[str]:
    """Weights set after the trainer was made count, also where only the leader sets them."""
    from gluon_esgd import world

    net = network()
    trainer = _trainer(net)
    if world().is_leader:
        for param in net.collect_params().values():
            param.set_data(mx.nd.ones(param.shape) * 0.5)
    x, y = batches()
    train_step(net, trainer, _mine(x[0]), _mine(y[0]))
    trainer.finish()
    return [digest(net), str(abs(float(flat(net).mean()) - 0.5) < 0.2)]


@ANY_RANKS
def test_weights_loaded_after_the_trainer_was_made_count(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_loaded_late)
    assert {near for _, near in results} == {"True"}
    size = shape.workers // shape.clients
    for client in range(shape.clients):
        assert len({d for d, _ in results[client * size : (client + 1) * size]}) == 1


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
    trainer = _trainer(net, **({"interval": 4} if world().settings.num_servers else {}))
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
    trainer = _trainer(net, **({"interval": 2} if world().settings.num_servers else {}))
    for x, y in zip(*batches()):
        train_step(net, trainer, _mine(x), _mine(y))
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
    trainer = _trainer(net, interval=64)
    x, y = batches()
    for i in range(3):
        train_step(net, trainer, x[i + world().client], y[i + world().client])
    trainer.finish()
    with trainer.center():
        moved = float(np.abs(flat(net) - flat(network())).max())
    return trainer.counters.exchanges, moved


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, 2, 1, "esgd")], ids=["esgd"])
def test_a_run_shorter_than_the_interval_has_a_center(pools: Pools, shape: Shape) -> None:
    for exchanges, moved in pools.get(shape).run(_short_run):
        assert exchanges == 1 and moved > 0


def _reset() -> Tuple[float, float]:
    net = network()
    trainer = _trainer(net, interval=2)
    for x, y in zip(*batches(6)):
        train_step(net, trainer, _mine(x), _mine(y))
    for param in net.collect_params().values():
        param.set_data(mx.nd.ones(param.shape) * 0.25)
    trainer.reset_center()
    with trainer.center():
        center = flat(net)
    trainer.finish()
    return float(center.min()), float(center.max())


@pytest.mark.servers
@pytest.mark.parametrize(
    "shape", [Shape(4, 2, 1, "esgd"), Shape(4, 2, 1, "asgd")], ids=["esgd", "asgd"]
)
def test_reset_center_takes_the_loaded_weights(pools: Pools, shape: Shape) -> None:
    for low, high in pools.get(shape).run(_reset):
        assert low == pytest.approx(0.25, abs=1e-6) and high == pytest.approx(0.25, abs=1e-6)


def _allreduce_then_update() -> np.ndarray:
    from gluon_esgd import world

    net = network()
    trainer = _trainer(net)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, y in zip(*batches(8)):
        with mx.autograd.record():
            loss = loss_of(net(mx.nd.array(_mine(x))), mx.nd.array(_mine(y)))
        loss.backward()
        trainer.allreduce_grads()
        trainer.update(len(x) // world().size)
    trainer.finish()
    return flat(net)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2), Shape(3)], ids=lambda s: s.workers)
def test_allreduce_then_update_equals_step(pools: Pools, shape: Shape) -> None:
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    for x, y in zip(*batches(8)):
        train_step(net, trainer, x, y)
    for weights in pools.get(shape).run(_allreduce_then_update):
        np.testing.assert_allclose(weights, flat(net), rtol=2e-5, atol=1e-6)


def _half_stale() -> Tuple[str, float]:
    """Rank 0 uses only the first of two networks, rank 1 both."""
    from gluon_esgd import world

    first, second = network(), network(seed=1)
    params = {**first.collect_params(), **second.collect_params()}
    from gluon_esgd import ElasticTrainer

    trainer = ElasticTrainer(params, "sgd", {"learning_rate": 0.1})
    x, y = batches()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for i in range(3):
        with mx.autograd.record():
            out = first(mx.nd.array(_mine(x[i])))
            if world().rank == 1:
                out = out + second(mx.nd.array(_mine(x[i])))
            loss = loss_of(out, mx.nd.array(_mine(y[i])))
        loss.backward()
        trainer.step(len(_mine(x[i])), ignore_stale_grad=True)
    trainer.finish()
    moved = float(np.abs(flat(second) - flat(network(seed=1))).max())
    return digest(first) + digest(second), moved


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=lambda s: s.workers)
def test_a_parameter_fresh_on_one_rank_moves_on_all(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_half_stale)
    assert results[0] == results[1] and results[0][1] > 0


def _devices() -> np.ndarray:
    from gluon_esgd import ElasticTrainer

    contexts = [mx.cpu(0), mx.cpu(1)]
    net = network(ctx=contexts)
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, y in zip(*batches(8)):
        parts = gluon.utils.split_and_load(mx.nd.array(_mine(x)), contexts)
        labels = gluon.utils.split_and_load(mx.nd.array(_mine(y)), contexts)
        with mx.autograd.record():
            losses = [loss_of(net(a), b) for a, b in zip(parts, labels)]
        for loss in losses:
            loss.backward()
        trainer.step(len(_mine(x)))
    trainer.finish()
    params = net.collect_params().values()
    both = [[p.data(c).asnumpy().ravel() for p in params] for c in contexts]
    assert all((a == b).all() for a, b in zip(*both))
    return np.concatenate(both[1])


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=lambda s: s.workers)
def test_devices_of_all_ranks_are_one_group(pools: Pools, shape: Shape) -> None:
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    for x, y in zip(*batches(8)):
        train_step(net, trainer, x, y)
    for weights in pools.get(shape).run(_devices):
        np.testing.assert_allclose(weights, flat(net), rtol=2e-5, atol=1e-6)


def _world() -> List[int]:
    from gluon_esgd import world

    w = world()
    assert w.broadcast({"from": w.client} if w.is_leader else None) == {"from": w.client}
    assert w.allgather(w.rank) == list(range(w.size))
    w.barrier()
    names = "client num_clients rank size local_rank local_size node_rank num_nodes"
    more = "worker_rank num_workers is_leader is_main"
    return [int(getattr(w, name)) for name in f"{names} {more}".split()]


@ANY_RANKS
def test_world_tells_every_place(pools: Pools, shape: Shape) -> None:
    size = shape.workers // shape.clients
    expected = [
        [k, shape.clients, r, size, r, size, 0, 1, k * size + r, shape.workers, r == 0, k + r == 0]
        for k in range(shape.clients)
        for r in range(size)
    ]
    assert pools.get(shape).run(_world) == expected


def _replicas(rule: str) -> List[str]:
    net = network()
    trainer = _trainer(net, interval=2, lazy=1)
    assert trainer.rule == rule
    seen = []
    for x, y in zip(*batches()):
        train_step(net, trainer, _mine(x), _mine(y))
        seen.append(digest(net))
    trainer.finish()
    return [*seen, digest(net)]


@pytest.mark.servers
@pytest.mark.parametrize(
    "shape", [Shape(4, 2, 1, "esgd"), Shape(4, 2, 1, "asgd")], ids=["esgd", "asgd"]
)
def test_replicas_have_the_same_bits_after_every_step(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_replicas, shape.rule)
    assert results[0] == results[1] and results[2] == results[3]


def _reset_by_leader() -> Tuple[str, float]:
    """Only the leader of client 0 has the new weights."""
    from gluon_esgd import world

    net = network()
    trainer = _trainer(net)
    x, y = batches()
    train_step(net, trainer, _mine(x[0]), _mine(y[0]))
    if world().is_main:
        for param in net.collect_params().values():
            param.set_data(mx.nd.ones(param.shape) * 5)
    trainer.reset_center()
    reset = digest(net), float(flat(net).min())
    train_step(net, trainer, _mine(x[1]), _mine(y[1]))
    trainer.finish()
    return reset


@ANY_RANKS
def test_reset_center_gives_everybody_the_weights_of_one(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_reset_by_leader)
    assert len(set(results)) == 1 and results[0][1] == 5


def _two_trainers() -> List[str]:
    """Two networks with their own optimizers and intervals, stepped in turn."""
    from gluon_esgd import ElasticTrainer, world

    nets = network(seed=1), network(seed=2, hidden=8)
    interval = {"interval": 3} if world().settings.num_servers else {}
    trainers = [
        ElasticTrainer(nets[0].collect_params(), "sgd", {"learning_rate": 0.1}, **interval),
        ElasticTrainer(nets[1].collect_params(), "adam", {"learning_rate": 0.01}),
    ]
    for i, (x, y) in enumerate(zip(*batches())):
        train_step(nets[0], trainers[0], _mine(x), _mine(y))
        if i % 2:
            train_step(nets[1], trainers[1], _mine(x), _mine(y))
    for trainer in trainers:
        trainer.finish()
    with trainers[0].center(), trainers[1].center():
        return [digest(net) for net in nets]


@ANY_RANKS
def test_two_trainers_in_one_script(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_two_trainers)
    size = shape.workers // shape.clients
    for first in range(0, shape.workers, size):
        assert results[first : first + size] == [results[first]] * size


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
    trainer.finish()
    master = trainer._updaters[0].states[0][1].asnumpy()
    own = param.data().asnumpy()
    with trainer.center(sync=True):
        center = float(param.data().asnumpy().mean())
    return float(own.mean()), float(master.mean()), center


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, 2, 1, "esgd")], ids=["esgd"])
def test_exchanges_move_masters_of_half_precision_weights(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_half_precision)
    for own, master, center in results:
        assert own == pytest.approx(master, abs=1e-3)
        assert own == pytest.approx(center, abs=0.02)
    assert results[0][1] != 1 and results[2][1] != 2


def _unfrozen() -> List[str]:
    net = network()
    net[0].weight.grad_req = "null"
    trainer = _trainer(net)
    seen = []
    for i, (x, y) in enumerate(zip(*batches(8))):
        if i == 4:
            net[0].weight.grad_req = "write"
        train_step(net, trainer, _mine(x), _mine(y))
        seen.append(digest(net))
    trainer.finish()
    return seen


@ANY_RANKS
def test_parameters_can_be_unfrozen_in_mid_run(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_unfrozen)
    size = shape.workers // shape.clients
    for first in range(0, shape.workers, size):
        assert results[first : first + size] == [results[first]] * size
    assert shape.rule != "sgd" or results[0] == results[-1]


def _set_on_one_rank() -> List[str]:
    from gluon_esgd import world

    net = network()
    trainer = _trainer(net)
    x, y = batches()
    for i in range(4):
        train_step(net, trainer, _mine(x[i]), _mine(y[i]))
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
    trainer = _trainer(net, interval=2)
    x, y = batches()
    for i in range(8):
        scale = np.nan if i == 3 and world().client == 1 else 1
        train_step(net, trainer, _mine(x[i]) * np.float32(scale), _mine(y[i]))
    trainer.finish()
    with trainer.center(sync=True):
        center = bool(np.isfinite(flat(net)).all())
    return bool(np.isfinite(flat(net)).all()), center


@pytest.mark.servers
@pytest.mark.parametrize(
    "shape", [Shape(4, 2, 1, "esgd"), Shape(4, 2, 1, "asgd")], ids=["esgd", "asgd"]
)
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


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, 2, 1, "esgd")], ids=["esgd"])
def test_freezing_between_snapshot_and_application_loses_nothing(
    pools: Pools, shape: Shape
) -> None:
    results = pools.get(shape).run(_frozen_in_flight)
    assert results[0][0] + results[2][0] + results[0][1] == pytest.approx(4, rel=1e-5)


def _all_frozen() -> str:
    net = network()
    for param in net.collect_params().values():
        param.grad_req = "null"
    trainer = _trainer(net)
    trainer.step(4)
    trainer.finish()
    return digest(net)


@ANY_RANKS
def test_a_network_that_is_frozen_whole_steps_without_work(pools: Pools, shape: Shape) -> None:
    assert len(set(pools.get(shape).run(_all_frozen))) == 1
