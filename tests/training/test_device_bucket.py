"""Gradients on GPUs are packed, reduced and unpacked there; CPU devices stand for GPUs."""

from __future__ import annotations

import logging
import re
from typing import Any, List, NamedTuple, Sequence, Tuple
from unittest import mock

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from gluon_esgd.communicator import Communicator

from ..collectives import fake_cupy
from ..collectives.kernel_library import compiler
from ..pool import Pools, Shape, label, run_once
from .fake_gpus import Vector, fake_gpus
from .problems import BATCH, batches, make_trainer, network, shares, train_step
from .telling import fail_at_step_3, telling, workers_that_raised

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine"),
]

STEPS = 6
# Buckets of one or two parameters: 96 + 16 and 48 + 3 elements.
SETTINGS = (("GLUON_ESGD_BUCKET_BYTES", "100"),)
ONE, TWO = Shape(1, settings=SETTINGS), Shape(2, settings=SETTINGS)
UNEVEN = {1: (1,), 2: (1, 2), 4: (3, 1, 2, 2)}  # relative shares of a batch, by devices in all


class Trained(NamedTuple):
    """What a rank has seen."""

    weights: np.ndarray  # the same on all of its devices, or NaN
    buckets: List[str]
    algorithms: List[str]


def _contexts(devices: int) -> List[mx.Context]:
    return [mx.cpu(k) for k in range(devices)]


def _spans(devices: int) -> List[slice]:
    """This rank's part of each batch, for each of its devices."""
    from gluon_esgd import world

    spans = shares(BATCH, UNEVEN[devices * world().size])
    return spans[world().rank * devices :][:devices]


def _backward(net: Any, x: np.ndarray, y: np.ndarray, spans: Sequence[slice]) -> int:
    """Gradients of a batch on all devices; return its samples."""
    loss_of, losses = gluon.loss.SoftmaxCrossEntropyLoss(), []
    with autograd.record():
        for ctx, span in zip(net[0].weight.list_ctx(), spans):
            a, b = (mx.nd.array(v[span], ctx=ctx) for v in (x, y))
            losses.append(loss_of(net(a), b))
    autograd.backward(losses)
    return sum(span.stop - span.start for span in spans)


def _weights(net: Any, devices: int) -> np.ndarray:
    by_device = [
        np.concatenate([p.list_data()[k].asnumpy().ravel() for p in net.collect_params().values()])
        for k in range(devices)
    ]
    alike = all((weights == by_device[0]).all() for weights in by_device)
    return by_device[0] if alike else by_device[0] * np.nan


def _seen(net: Any, devices: int, reducer: Any) -> Trained:
    buckets = [type(bucket).__name__ for bucket in reducer._buckets]
    return Trained(_weights(net, devices), buckets, [p.algorithm for p in reducer._plans])


def _train(devices: int, change: str = "") -> Trained:
    net = network(ctx=_contexts(devices))
    trainer = make_trainer(net)
    for step, (x, y) in enumerate(zip(*batches(STEPS))):
        if step == 2 and change == "cast":
            net.cast("float64")
            net.cast("float32")
        if step == 2 and change == "reset_ctx":
            net.collect_params().reset_ctx(_contexts(1))
            devices = 1
        trainer.step(_backward(net, x, y, _spans(devices)))
    seen = _seen(net, devices, trainer._replica._reducer)
    trainer.finish()
    return seen


def _on_gpus(devices: int, order: str, change: str = "") -> Trained:
    from gluon_esgd import world

    with fake_gpus(world().comm, order=order):
        return _train(devices, change)


def _alone(batches_: Tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    net = network()
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=None)
    for x, y in zip(*batches_):
        train_step(net, trainer, x, y)
    return _weights(net, 1)


def _check(
    results: Sequence[Trained], bucket: str = "DeviceBucket", tolerance: float = 1e-6
) -> None:
    expected = _alone(batches(STEPS))
    for seen in results:
        assert np.linalg.norm(seen.weights - expected) < tolerance * np.linalg.norm(expected)
        assert (seen.weights == results[0].weights).all()
        assert len(seen.buckets) > 1 and set(seen.buckets) == {bucket}
        assert seen.algorithms == results[0].algorithms


@pytest.mark.parametrize("shape", [TWO], ids=label)
@pytest.mark.parametrize("order", fake_cupy.ORDERS)
@pytest.mark.parametrize("devices", [1, 2])
def test_training_of_two_ranks(pools: Pools, shape: Shape, devices: int, order: str) -> None:
    results = pools.get(shape).run(_on_gpus, devices, order)
    _check(results)
    assert set(results[0].algorithms) == {"cuda"}


@pytest.mark.parametrize("shape", [TWO], ids=label)
@pytest.mark.parametrize("change", ["cast", "reset_ctx"])
def test_gradients_that_were_replaced(pools: Pools, shape: Shape, change: str) -> None:
    _check(pools.get(shape).run(_on_gpus, 2, "late", change))


@pytest.mark.parametrize("algorithm", ["host_staged", "nccl"])
def test_another_algorithm(pools: Pools, algorithm: str) -> None:
    shape = TWO._replace(settings=(*SETTINGS, ("GLUON_ESGD_ALGORITHM", algorithm)))
    results = pools.get(shape).run(_on_gpus, 2, "mixed")
    _check(results)
    assert set(results[0].algorithms) == {algorithm}


def test_an_algorithm_for_the_cpu_is_made_there(pools: Pools) -> None:
    shape = TWO._replace(settings=(*SETTINGS, ("GLUON_ESGD_ALGORITHM", "ring")))
    _check(pools.get(shape).run(_on_gpus, 2, "late"), "Bucket")


def _train_one_rank(contexts: List[mx.Context]) -> Trained:
    """A rank that is alone in its job needs no collective; its devices do."""
    from gluon_esgd import world
    from gluon_esgd.counters import Counters
    from gluon_esgd.engine import lane
    from gluon_esgd.gradients import GradientReducer

    net, devices = network(ctx=contexts), len(contexts)
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=None)
    with mock.patch.object(GradientReducer, "needed", property(lambda _: True)):
        reducer = GradientReducer(
            trainer._params, world().comm, lane(), Counters(), world().settings
        )
        for step, (x, y) in enumerate(zip(*batches(STEPS))):
            samples = _backward(net, x, y, _spans(devices))
            reducer.settle()
            reducer.reduce(step, samples)
            trainer._update()
    lane().wait()
    return _seen(net, devices, reducer)


def _one_rank(devices: int, order: str) -> Trained:
    from gluon_esgd import world

    with fake_gpus(world().comm, order=order):
        return _train_one_rank(_contexts(devices))


@pytest.mark.parametrize("shape", [ONE], ids=label)
@pytest.mark.parametrize("order", fake_cupy.ORDERS)
@pytest.mark.parametrize("devices", [1, 2])
def test_training_of_one_rank(pools: Pools, shape: Shape, devices: int, order: str) -> None:
    _check(pools.get(shape).run(_one_rank, devices, order))


def _one_rank_on_gpus() -> Trained:
    return _train_one_rank([mx.gpu(k) for k in range(min(2, mx.context.num_gpus()))])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [ONE], ids=label)
def test_training_on_gpus(pools: Pools, shape: Shape) -> None:
    if not mx.context.num_gpus():
        pytest.skip("MXNet finds no GPU")
    _check(pools.get(shape).run(_one_rank_on_gpus), tolerance=1e-5)


def _train_half() -> List[Any]:
    from gluon_esgd import ElasticTrainer, world

    param = gluon.Parameter("w", shape=(3,), dtype="float16")
    param.initialize(mx.init.Zero())
    trainer = ElasticTrainer([param], "sgd", {"learning_rate": 1.0, "multi_precision": True})
    with autograd.record():
        loss = (param.data() * 0).sum()
    loss.backward()
    param.grad()[:] = 2048 if world().rank == 0 else 1
    trainer.step(1)
    total = (param.grad() * world().size).asnumpy()
    (bucket,) = trainer._replica._reducer._buckets
    trainer.finish()
    return [*map(float, total), bucket.vectors[0].dtype.name]


def _half() -> List[Any]:
    """fp16 gradients, filled by hand, are added up in fp32: 2048 + 1 is no half float."""
    from gluon_esgd import world

    with fake_gpus(world().comm):
        return _train_half()


@pytest.mark.parametrize("shape", [TWO], ids=label)
def test_half_gradients_are_added_up_in_float32(pools: Pools, shape: Shape) -> None:
    expected = [2048.0] * 3  # 2049 rounded once, to even
    assert pools.get(shape).run(_half) == [[*expected, "float32"]] * 2


def _without_cupy(rank: int) -> Tuple[Trained, List[str]]:
    from gluon_esgd import world

    said: List[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("gluon_esgd.device_bucket")
    log.addHandler(handler)
    try:
        with fake_gpus(world().comm, cupy=world().rank != rank):
            return _train(2), said
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize("shape", [TWO], ids=label)
@pytest.mark.parametrize("rank", [0, 1])
def test_where_a_rank_has_no_cupy_all_go_through_the_cpu(
    pools: Pools, shape: Shape, rank: int
) -> None:
    results = pools.get(shape).run(_without_cupy, rank)
    _check([seen for seen, _ in results], "Bucket")
    ((said,), nothing) = (said for _, said in results)
    assert not nothing
    assert f"copied to the CPU and reduced there: rank {rank}: " in said and "install CuPy" in said


def _count_copies(machine: fake_cupy.Machine) -> Tuple[int, int]:
    net, (x, y) = network(ctx=_contexts(2)), batches(2)
    trainer = make_trainer(net)
    trainer.step(_backward(net, x[0], y[0], _spans(2)))
    mx.nd.waitall()
    before = machine.copies
    trainer.step(_backward(net, x[1], y[1], _spans(2)))
    mx.nd.waitall()
    copies, buckets = machine.copies - before, len(trainer._replica._reducer._buckets)
    trainer.finish()
    return copies, buckets


def _copies() -> Tuple[int, int]:
    from gluon_esgd import world

    with fake_gpus(world().comm) as machine:
        return _count_copies(machine)


@pytest.mark.parametrize("shape", [TWO], ids=label)
def test_each_gradient_is_copied_in_and_out_once(pools: Pools, shape: Shape) -> None:
    gradients, devices = 4, 2
    for copies, buckets in pools.get(shape).run(_copies):
        tails = buckets * (devices + 1)
        assert copies == 2 * gradients * devices + tails


def _fail(how: str) -> None:
    """Steps of which one fails on rank 1."""
    from gluon_esgd import world

    fail_at_step_3(worker=1 if how == "packing" else -1)
    with fake_gpus(world().comm):
        net, (x, y) = network(ctx=_contexts(2)), batches(STEPS)
        trainer = make_trainer(net)
        with telling():
            for step in range(STEPS):
                if how == "copy" and (step, world().rank) == (2, 1):
                    views = trainer._replica._reducer._buckets[0]._views
                    views[1][0] = Vector(np.zeros(1, np.float32), 1)
                trainer.step(_backward(net, x[step], y[step], _spans(2)))
                mx.nd.waitall()


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("packing", r"MemoryError\('no room"),
        ("copy", r"ValueError\('cannot copy \(1,\)"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(how: str, cause: str) -> None:
    ended = run_once(TWO, _fail, how)
    assert ended.code != 0
    assert workers_that_raised(ended.output) == ["0", "1"]
    raised = r"CollectiveError: gradient bucket 0 \(.*\), step 3, seen by rank \d: "
    assert len(re.findall(f"{raised}rank 1: packing failed: {cause}", ended.output)) == 2


def _a_device_fails() -> List[str]:
    """An error of CUDA is no error mark: this rank's collective fails."""
    from gluon_esgd.bucket import lay
    from gluon_esgd.device_bucket import DeviceBucket
    from gluon_esgd.errors import CollectiveError

    with fake_gpus(Communicator()) as machine:
        params = list(network().collect_params().values())
        (layout,) = lay(params, 1 << 20)
        bucket, said = DeviceBucket(0, params, layout, [0], Communicator()), []
        machine.broken = 700
        packing = bucket.packing()
        packing.pack()
        for action in (lambda: bucket.set_tail(1, False), bucket.errors, packing.unpack):
            try:
                action()
            except CollectiveError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("shape", [ONE], ids=label)
def test_an_error_of_a_device_names_what_failed(pools: Pools, shape: Shape) -> None:
    ((into, tail, out_of),) = pools.get(shape).run(_a_device_fails)
    failed = r"gradient bucket 0 \(.*, 4 parameters\) failed: CUDA error 700"
    assert re.search(f"the copies into {failed}", into)
    assert re.search(f"the tail of {failed}", tail)
    assert re.search(f"the copies out of {failed}", out_of)
