"""What holds on all ranks of a client, whatever the order in which things happen."""

from __future__ import annotations

from typing import List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from ..pool import Pools, Shape
from .problems import batches, digest, flat, make_trainer, network, own_share, train_step
from .shapes import ANY_RANKS, ESGD, ESGD_ASGD


def _deferred() -> Tuple[str, str]:
    from gluon_esgd import world

    net = network(seed=10 + world().worker_rank, deferred=True)
    trainer = make_trainer(net)
    x, y = batches()
    net(mx.nd.array(x[0]))
    first = digest(net)
    train_step(net, trainer, own_share(x[0]), own_share(y[0]))
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
    trainer = make_trainer(net)
    before = flat(net)
    x, y = batches()
    train_step(net, trainer, own_share(x[0]), own_share(y[0]))
    after = flat(net)
    trainer.finish()
    return before, after


@ESGD
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
    trainer = make_trainer(net)
    if world().is_leader:
        for param in net.collect_params().values():
            param.set_data(mx.nd.ones(param.shape) * 0.5)
    x, y = batches()
    train_step(net, trainer, own_share(x[0]), own_share(y[0]))
    trainer.finish()
    return [digest(net), str(abs(float(flat(net).mean()) - 0.5) < 0.2)]


@ANY_RANKS
def test_weights_loaded_after_the_trainer_was_made_count(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_loaded_late)
    assert {near for _, near in results} == {"True"}
    size = shape.workers // shape.clients
    for client in range(shape.clients):
        assert len({d for d, _ in results[client * size : (client + 1) * size]}) == 1


def _allreduce_then_update() -> np.ndarray:
    from gluon_esgd import world

    net = network()
    trainer = make_trainer(net)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, y in zip(*batches(8)):
        with mx.autograd.record():
            loss = loss_of(net(mx.nd.array(own_share(x))), mx.nd.array(own_share(y)))
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
            out = first(mx.nd.array(own_share(x[i])))
            if world().rank == 1:
                out = out + second(mx.nd.array(own_share(x[i])))
            loss = loss_of(out, mx.nd.array(own_share(y[i])))
        loss.backward()
        trainer.step(len(own_share(x[i])), ignore_stale_grad=True)
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
        parts = gluon.utils.split_and_load(mx.nd.array(own_share(x)), contexts)
        labels = gluon.utils.split_and_load(mx.nd.array(own_share(y)), contexts)
        with mx.autograd.record():
            losses = [loss_of(net(a), b) for a, b in zip(parts, labels)]
        for loss in losses:
            loss.backward()
        trainer.step(len(own_share(x)))
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
    trainer = make_trainer(net, interval=2, lazy=1)
    assert trainer.rule == rule
    seen = []
    for x, y in zip(*batches()):
        train_step(net, trainer, own_share(x), own_share(y))
        seen.append(digest(net))
    trainer.finish()
    return [*seen, digest(net)]


@ESGD_ASGD
def test_replicas_have_the_same_bits_after_every_step(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_replicas, shape.rule)
    assert results[0] == results[1] and results[2] == results[3]


def _two_trainers() -> List[str]:
    """Two networks with their own optimizers and intervals, stepped in turn."""
    from gluon_esgd import ElasticTrainer, world

    nets = network(seed=1), network(seed=2, hidden=8)
    interval = {"interval": 3} if world().num_clients > 1 else {}
    trainers = [
        ElasticTrainer(nets[0].collect_params(), "sgd", {"learning_rate": 0.1}, **interval),
        ElasticTrainer(nets[1].collect_params(), "adam", {"learning_rate": 0.01}),
    ]
    for i, (x, y) in enumerate(zip(*batches())):
        train_step(nets[0], trainers[0], own_share(x), own_share(y))
        if i % 2:
            train_step(nets[1], trainers[1], own_share(x), own_share(y))
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


def _unfrozen() -> List[str]:
    net = network()
    net[0].weight.grad_req = "null"
    trainer = make_trainer(net)
    seen = []
    for i, (x, y) in enumerate(zip(*batches(8))):
        if i == 4:
            net[0].weight.grad_req = "write"
        train_step(net, trainer, own_share(x), own_share(y))
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


def _all_frozen() -> str:
    net = network()
    for param in net.collect_params().values():
        param.grad_req = "null"
    trainer = make_trainer(net)
    trainer.step(4)
    trainer.finish()
    return digest(net)


@ANY_RANKS
def test_a_network_that_is_frozen_whole_steps_without_work(pools: Pools, shape: Shape) -> None:
    assert len(set(pools.get(shape).run(_all_frozen))) == 1
