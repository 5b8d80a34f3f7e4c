"""`clip_global_norm`: one norm over ranks, devices and parameters."""

from __future__ import annotations

import logging
from typing import Any, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.contrib import amp

from gluon_esgd import ElasticTrainer
from gluon_esgd.clipping import _on_devices, global_norm

from ..pool import Pools, Shape, label, run_once
from .problems import BATCH, batches, flat, network
from .telling import telling, workers_that_raised
from .test_accumulation import backward, flat_of_all, use_loss_scale

LR, LIMIT = 0.1, 2.0

DISTRIBUTED = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        *(
            pytest.param(Shape(workers, 2, 1, rule), marks=pytest.mark.servers)
            for workers in (2, 4)
            for rule in ("sgd", "asgd", "esgd")
        ),
    ],
    ids=label,
)


def _clipped(devices: int) -> Tuple[List[float], np.ndarray]:
    """Two updates on batches of this worker's own; norms, and the weights of all devices."""
    from gluon_esgd import world

    net = network(ctx=[mx.cpu(i) for i in range(devices)])
    interval = {} if world().settings.rule in (None, "sgd") else {"interval": 1000}
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": LR}, **interval)
    mine = slice(world().worker_rank, None, world().num_workers)
    norms = []
    for x, y in list(zip(*batches(2 * world().num_workers)))[mine]:
        backward(net, x, y)
        trainer.allreduce_grads()
        norms.append(trainer.clip_global_norm(LIMIT))
        after = trainer.clip_global_norm(1e9)
        assert after == pytest.approx(min(norms[-1], LIMIT), rel=1e-6)
        trainer.update(BATCH)
    weights = flat_of_all(net)
    trainer.finish()
    return norms, weights


def _by_hand(workers: List[int], num_workers: int) -> Tuple[List[float], np.ndarray]:
    """The same in numpy, from the gradients that plain Gluon has on each worker's batch."""
    net = network()
    params = list(net.collect_params().values())
    everything = list(zip(*batches(2 * num_workers)))
    norms = []
    for step in range(2):
        gradient = [np.zeros(p.shape) for p in params]
        for worker in workers:
            backward(net, *everything[worker + step * num_workers])
            for total, param in zip(gradient, params):
                total += param.grad().asnumpy() / len(workers)
        norms.append(np.sqrt(sum((g**2).sum() for g in gradient)))
        for param, g in zip(params, gradient):
            change = LR / BATCH * g * min(1, LIMIT / norms[-1])
            param.set_data(mx.nd.array(param.data().asnumpy() - change))
    return norms, flat(net)


@pytest.mark.parametrize("devices", [1, 2])
@DISTRIBUTED
def test_allreduce_clip_update_equals_a_hand_computation(
    pools: Pools, shape: Shape, devices: int
) -> None:
    size = shape.workers // shape.clients
    results = pools.get(shape).run(_clipped, devices)
    for client in range(shape.clients):
        ranks = list(range(client * size, (client + 1) * size))
        sums = list(range(shape.workers)) if shape.rule == "sgd" else ranks
        expected_norms, expected = _by_hand(sums, shape.workers)
        assert min(expected_norms) > LIMIT, "nothing to clip"
        for rank in ranks:
            norms, weights = results[rank]
            assert norms == results[ranks[0]][0], "other bits on another rank"
            np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
            np.testing.assert_array_equal(weights, results[ranks[0]][1])
            one_device = _first_of(weights, devices)
            np.testing.assert_allclose(one_device, expected, rtol=2e-5, atol=1e-6)


def _first_of(weights: np.ndarray, devices: int) -> np.ndarray:
    """One device's weights out of those of all, which are alike."""
    sizes = [p.data().size for p in network().collect_params().values()]
    out, start = [], 0
    for n in sizes:
        copies = weights[start : start + n * devices].reshape(devices, n)
        assert (copies == copies[0]).all()
        out.append(copies[0])
        start += n * devices
    return np.concatenate(out)


def alone(**kwargs: Any) -> Tuple[Any, Any]:
    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": LR}, **kwargs)
    backward(net, *[part[0] for part in batches()])
    trainer.allreduce_grads()
    return net, trainer


def test_alone_it_is_what_gluon_clips() -> None:
    net, trainer = alone()
    norm = trainer.clip_global_norm(LIMIT)
    ours = [p.grad().asnumpy() for p in net.collect_params().values()]
    net, _ = alone()
    gradients = [p.grad() for p in net.collect_params().values()]
    theirs = gluon.utils.clip_global_norm(gradients, LIMIT)
    assert norm == pytest.approx(theirs, rel=1e-6) and norm > LIMIT
    for a, b in zip(ours, gradients):
        np.testing.assert_allclose(a, b.asnumpy(), rtol=1e-6)


@pytest.mark.parametrize("limit", [1e6, np.float32(1e6), 10**6, float("inf")])
def test_short_gradients_keep_their_bits(limit: Any) -> None:
    net, trainer = alone()
    before = [p.grad().asnumpy() for p in net.collect_params().values()]
    trainer.clip_global_norm(limit)
    for a, p in zip(before, net.collect_params().values()):
        np.testing.assert_array_equal(a, p.grad().asnumpy())


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "1", None, [1.0]])
def test_a_limit_must_be_a_number_above_zero(limit: Any) -> None:
    _, trainer = alone()
    with pytest.raises(ValueError, match=r"max_norm=.* must be a number above 0"):
        trainer.clip_global_norm(limit)


def test_frozen_parameters_have_no_part() -> None:
    net = network()
    net[0].weight.grad_req = "null"
    trainer = ElasticTrainer(net.collect_params(), "sgd")
    backward(net, *[part[0] for part in batches()])
    rest = [p.grad().asnumpy() for p in net.collect_params().values() if p.grad_req != "null"]
    expected = np.sqrt(sum((g.astype("d") ** 2).sum() for g in rest))
    assert trainer.clip_global_norm(1.0) == pytest.approx(expected, rel=1e-9)


def test_half_floats_are_added_up_in_wide_ones() -> None:
    param = gluon.Parameter("w", shape=(300, 300), dtype="float16", init="zeros")
    param.initialize()
    trainer = ElasticTrainer([param], "sgd", {"multi_precision": True})
    param.grad()[:] = 2.0
    assert trainer.clip_global_norm(60.0) == pytest.approx(600.0, rel=1e-9)
    np.testing.assert_allclose(param.grad().asnumpy(), 0.2, rtol=1e-3)


def test_sparse_gradients_have_their_rows() -> None:
    layer = gluon.nn.Embedding(50, 4, sparse_grad=True)
    layer.initialize()
    trainer = ElasticTrainer(layer.collect_params(), "sgd")
    with mx.autograd.record():
        loss = (layer(mx.nd.array([1, 3, 3])) ** 2).sum()
    loss.backward()
    before = layer.weight.grad().tostype("default").asnumpy()
    norm = trainer.clip_global_norm(0.1)
    assert norm == pytest.approx(np.linalg.norm(before), rel=1e-5) and norm > 0.1
    after = layer.weight.grad().tostype("default").asnumpy()
    np.testing.assert_allclose(after, before * (0.1 / norm), rtol=1e-5)


def test_on_other_devices_mxnet_adds_up() -> None:
    params = list(network().collect_params().values())
    for i, param in enumerate(params):
        param.grad()[:] = mx.nd.random.normal(shape=param.shape) * (i + 1)
    squares = _on_devices([param.grad() for param in params])
    assert np.sqrt(sum(squares)) == pytest.approx(global_norm(params), rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_changes_nothing_and_is_said_once(
    caplog: pytest.LogCaptureFixture, value: float
) -> None:
    net, trainer = alone()
    net[1].bias.grad()[:1] = value
    before = net[0].weight.grad().asnumpy()
    with caplog.at_level(logging.WARNING):
        seen = [trainer.clip_global_norm(0.1) for _ in range(2)]
    assert not np.isfinite(seen).any()
    np.testing.assert_array_equal(net[0].weight.grad().asnumpy(), before)
    assert [r.getMessage() for r in caplog.records] == [
        f"clip_global_norm: the norm is {value}; gradients stay as they are"
    ]


def apart(what: str) -> None:
    """Two ranks that give other numbers."""
    from gluon_esgd import world

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": LR})
    more = world().rank
    with telling():
        for x, y in zip(*batches(3)):
            backward(net, x, y)
            trainer.allreduce_grads()
            trainer.clip_global_norm(LIMIT + more * (what == "max_norm"))
            trainer.update(BATCH + more * (what == "batch_size"))
            mx.nd.waitall()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("what", "values"),
    [("max_norm", "[[24.0, 2.0], [24.0, 3.0]]"), ("batch_size", "[[24.0, 2.0], [25.0, 2.0]]")],
)
def test_ranks_that_clip_or_update_otherwise_are_told(what: str, values: str) -> None:
    ended = run_once(Shape(2), apart, what)
    said = (
        "batch_size of update() and max_norm of clip_global_norm() must be the same on all ranks, "
        f"got {values} by rank"
    )
    assert ended.code != 0 and ended.output.count(said) == 2, ended.output
    assert workers_that_raised(ended.output) == ["0", "1"]


def _with_amp(overflow: bool) -> Tuple[float, bool, List[str]]:
    """A scaled loss, unscaled before clipping; on rank 1 one gradient overflows."""
    from gluon_esgd import world

    said: List[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gluon_esgd").addHandler(handler)
    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": LR})
    use_loss_scale(trainer)
    before = flat(net)
    x, y = batches(4)
    backward(net, x[world().rank], y[world().rank], trainer)
    if overflow and world().rank == 1:
        net[0].weight.grad()[0, 0] = np.inf
    trainer.allreduce_grads()
    amp.unscale(trainer)
    norm = trainer.clip_global_norm(LIMIT)
    trainer.update(BATCH)
    kept = bool((flat(net) == before).all())
    trainer.finish()
    logging.getLogger("gluon_esgd").removeHandler(handler)
    return norm, kept, said


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_with_amp_an_overflow_of_one_rank_skips_the_update_of_all(
    pools: Pools, shape: Shape
) -> None:
    pool = pools.get(shape)
    norms, _ = _by_hand([0, 1], 2)
    for norm, kept, said in pool.run(_with_amp, False):
        assert norm == pytest.approx(norms[0], rel=1e-5) and not kept and not said
    results = pool.run(_with_amp, True)
    assert [(norm, kept) for norm, kept, _ in results] == [(np.inf, True)] * 2
    assert [len(said) for *_, said in results] == [1, 0], "one warning, of the leader"
