"""A rank that has no batches left takes part, with no samples, until all have none."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any, Dict, List, Sequence, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from ..pool import Pools, Shape, label, run_once
from .problems import batches, digest, flat, make_trainer, network, shares, train_step
from .telling import telling, worker_rank, workers_that_raised

ROUNDS = [[5, 3, 7, 2], [2, 0, 1, 0]]  # batches of each worker, in two rounds of training
SIZES = [3, 1, 2, 2]  # and its part of a batch
MANY_BUCKETS = (("GLUON_ESGD_BUCKET_BYTES", "64"),)


def _data(workers: int, begin: int) -> List[List[Tuple[np.ndarray, np.ndarray]]]:
    """For each step behind `begin` the part of each worker."""
    x, y = batches(20)
    parts = shares(len(x[0]), SIZES[:workers])
    return [[(x[s][part], y[s][part]) for part in parts] for s in range(begin, 20)]


def _rounds(workers: int) -> List[Tuple[Sequence[int], list]]:
    counts = [each[:workers] for each in ROUNDS]
    return [(counts[0], _data(workers, 0)), (counts[1], _data(workers, max(counts[0])))]


def _one_process(optimizer: str, settings: Dict[str, Any], workers: int) -> np.ndarray:
    """Plain Gluon on all samples of each step."""
    net, made = network(), 0
    trainer = gluon.Trainer(net.collect_params(), optimizer, dict(settings))
    for counts, data in _rounds(workers):
        for step in range(max(counts)):
            there = [data[step][w] for w in range(workers) if step < counts[w]]
            trainer.set_learning_rate(0.05 / (1 + made))
            train_step(net, trainer, *(np.concatenate(each) for each in zip(*there)))
            made += 1
    return flat(net)


def _uneven(optimizer: str, settings: Dict[str, Any]) -> Tuple[np.ndarray, str, List[int], int]:
    """Ranks that still train set the learning rate; those that have joined follow."""
    from gluon_esgd import ElasticTrainer, world

    me, net, joined, made = world(), network(seed=world().rank), [], 0
    trainer = ElasticTrainer(net.collect_params(), optimizer, dict(settings))
    for counts, data in _rounds(me.num_workers):
        for step in range(counts[me.worker_rank]):
            trainer.set_learning_rate(0.05 / (1 + made))
            train_step(net, trainer, *data[step][me.worker_rank])
            made += 1
        joined.append(trainer.join())
        made += joined[-1]
    trainer.finish()
    return flat(net), digest(net), joined, trainer.counters.steps


SHAPES = [
    pytest.param(Shape(3), marks=pytest.mark.mpi),
    pytest.param(Shape(3, settings=(("GLUON_ESGD_NODES", "2,1"), *MANY_BUCKETS)), id="3-nodes"),
    pytest.param(Shape(4, 2, 0, "sgd", settings=MANY_BUCKETS), marks=pytest.mark.mpi),
    pytest.param(Shape(4, 2, 2, "sgd"), marks=pytest.mark.servers),
]
MOMENTUM = ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3})
ADAM = ("adam", {"learning_rate": 0.05})


@pytest.mark.mpi
@pytest.mark.parametrize(("optimizer", "settings"), [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_uneven_batches_give_what_one_process_makes_of_the_same_samples(
    pools: Pools, shape: Shape, optimizer: str, settings: Dict[str, Any]
) -> None:
    results = pools.get(shape).run(_uneven, optimizer, settings)
    wanted = _one_process(optimizer, settings, shape.workers)
    assert len({digest for _, digest, _, _ in results}) == 1, "replicas differ"
    for worker, (weights, _, joined, steps) in enumerate(results):
        np.testing.assert_allclose(weights, wanted, atol=2e-6)
        counts = [each[: shape.workers] for each in ROUNDS]
        assert joined == [max(each) - each[worker] for each in counts]
        assert steps == sum(map(max, counts))


def _within_a_client(scheduled: bool) -> Tuple[str, int, int, float]:
    from gluon_esgd import ElasticTrainer, world

    me, net = world(), network()
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.05) if scheduled else None
    settings = {"learning_rate": 0.05, "momentum": 0.9, "lr_scheduler": schedule}
    trainer = ElasticTrainer(net.collect_params(), "sgd", settings, interval=2, lazy=1)
    for x, y in zip(*batches(7 if me.rank else 4)):
        train_step(net, trainer, x, y)
    made = trainer.join()
    assert trainer.counters.steps == 7 and made == (0 if me.rank else 3)
    trainer.finish()
    return digest(net), trainer.counters.exchanges, me.client, trainer.learning_rate


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(4, 2, 0, "esgd"), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 1, "esgd"), marks=pytest.mark.servers),
    ],
    ids=label,
)
def test_a_rank_that_has_joined_exchanges_with_its_client(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_within_a_client, True)
    for client in (0, 1):
        both = [(said, exchanges, lr) for said, exchanges, c, lr in results if c == client]
        assert both[0] == both[1], "replicas of a client differ"
        assert both[0][1] == 4, "three that were due, and the last one"
        assert both[0][2] == pytest.approx(0.05 / 8)


def _adding_up() -> Tuple[str, List[float]]:
    """Gradients that add up, with samples counted in between."""
    from gluon_esgd import world

    me, net = world(), network()
    params = net.collect_params()
    params.setattr("grad_req", "add")
    trainer = make_trainer(net)
    for i, (x, y) in enumerate(zip(*batches(6 if me.rank else 2)), 1):
        with nullcontext() if i % 2 == 0 else trainer.no_sync():
            train_step(net, trainer, x, y)
        if i % 2 == 0:
            params.zero_grad()
    trainer.join()
    left = [float(abs(p.grad().asnumpy()).max()) for p in params.values()]
    trainer.finish()
    return digest(net), left


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(3)], ids=label)
def test_gradients_that_add_up_are_zero_after_a_join(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_adding_up)
    assert len({said for said, _ in results}) == 1
    assert all(left == [0] * len(left) for _, left in results)


def _with_a_loss_scale() -> Tuple[str, np.ndarray, float]:
    """As amp.init_trainer does; the scale doubles after every second update."""
    from mxnet.contrib import amp
    from mxnet.contrib.amp.loss_scaler import LossScaler

    from gluon_esgd import world

    me, net = world(), network()
    trainer = make_trainer(net)
    trainer._amp_loss_scaler, trainer._amp_original_scale = LossScaler(), trainer._scale
    trainer._amp_loss_scaler._scale_seq_len = 2
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, y in list(zip(*batches()))[: 7 if me.rank == 1 else 2]:
        with autograd.record():
            loss = loss_of(net(mx.nd.array(x)), mx.nd.array(y))
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(len(x))
    trainer.join()
    scale = float(trainer._amp_loss_scaler.loss_scale)
    trainer.finish()
    return digest(net), flat(net), scale


@pytest.mark.mpi
def test_a_rank_that_has_joined_follows_the_loss_scale(pools: Pools) -> None:
    results = pools.get(Shape(3)).run(_with_a_loss_scale)
    assert len({said for said, _, _ in results}) == 1, "replicas differ"
    assert len({scale for _, _, scale in results}) == 1 and results[0][2] > 2.0**17
    net = network()
    trainer = make_trainer(net)
    for x, y in list(zip(*batches()))[:7]:  # all ranks have the same batches
        train_step(net, trainer, x, y)
    np.testing.assert_allclose(results[0][1], flat(net), atol=2e-6)


def _refused_here() -> List[str]:
    """What join() refuses on each rank, before it has met anybody."""
    said = []
    net = network()
    net.collect_params().setattr("grad_req", "add")
    trainer = make_trainer(net)
    x, y = (each[0] for each in batches())

    def attempt() -> None:
        try:
            trainer.join()
        except RuntimeError as error:
            said.append(str(error))

    with trainer.no_sync():
        attempt()
        train_step(net, trainer, x, y)
    attempt()
    train_step(net, trainer, x, y)
    assert trainer.join() == 0
    with trainer.center():
        attempt()
    train_step(net, trainer, x, y, ignore_stale_grad=True)
    attempt()
    trainer.finish()
    return said


@pytest.mark.mpi
def test_what_a_join_refuses(pools: Pools) -> None:
    for said in pools.get(Shape(3)).run(_refused_here):
        wanted = ["inside `with trainer.no_sync", "24 samples", "center's weights", "ignore_stale"]
        assert len(said) == 4 and all(map(str.__contains__, said, wanted)), said


def test_alone_a_join_returns_at_once() -> None:
    net = network()
    trainer = make_trainer(net)
    assert trainer.join() == 0
    x, y = (each[0] for each in batches())
    train_step(net, trainer, x, y)
    assert trainer.join() == 0 and trainer.counters.steps == 1


def others_clip() -> None:
    net = network()
    trainer = make_trainer(net)
    with telling():
        for i, (x, y) in enumerate(zip(*batches())):
            if i == 2 and worker_rank() == 1:
                trainer.join()  # which raises
            with autograd.record():
                loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(mx.nd.array(x)), mx.nd.array(y))
            loss.backward()
            trainer.allreduce_grads()
            trainer.update(len(x))
            mx.nd.waitall()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("shape", "who"),
    [(Shape(3), r"rank\(s\) \[1\]"), (Shape(2, 2, 0, "sgd"), "all ranks of a client")],
    ids=["ranks", "clients"],
)
def test_pairs_of_allreduce_and_update_are_refused_on_all_ranks(shape: Shape, who: str) -> None:
    ended = run_once(shape, others_clip)
    assert ended.code != 0
    assert workers_that_raised(ended.output) == [str(worker) for worker in range(shape.workers)]
    found = re.findall(rf"step 3, seen by rank \d: {who} have called join\(\)", ended.output)
    assert len(found) == shape.workers, ended.output
