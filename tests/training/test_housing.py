"""Gradients live in memory that ranks share, and are packed where they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from gluon_esgd.engine import move, view

from ..pool import Pools, Shape, label, run_once
from .problems import batches, digest, flat, make_trainer, network, own_share, train_step

STEPS = 6


def _housed(trainer: Any) -> List[bool]:
    """Whether each gradient lies in its bucket, by what the engine says of its memory."""
    buckets = trainer._replica._reducer._buckets
    low = {b: b.buffer.ctypes.data for b in buckets}
    found = []
    for param in trainer._params:
        address = view(param.list_grad()[0]).ctypes.data
        found.append(any(low[b] <= address < low[b] + b.buffer.nbytes for b in buckets))
    return found


# What a script may do to its network: step -2 is before the trainer is made, -1 after.
def _nothing(net: Any, step: int) -> None:
    return None


def _hybridize(net: Any, step: int) -> None:
    if step == -2:
        net.hybridize(static_alloc=True, static_shape=True)


def _backward_before(net: Any, step: int) -> None:
    """A static graph goes on writing where it wrote first."""
    if step == -2:
        net.hybridize(static_alloc=True, static_shape=True)
    if step in (-2, -1):
        with autograd.record():
            loss = net(mx.nd.array(own_share(batches(1)[0][0]))).sum()
        loss.backward()
        net.collect_params().zero_grad()


def _trained_before(net: Any, step: int) -> None:
    """The same, where nothing shows it any more."""
    if step == -2:
        before = flat(net)
        net.hybridize(static_alloc=True, static_shape=True)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None)
        x, y = batches(1)
        train_step(net, trainer, own_share(x[0]), own_share(y[0]))
        net.collect_params().zero_grad()
        _set(net, before)


def _initialize_again(net: Any, step: int) -> None:
    if step == 2:
        before = flat(net)
        net.initialize(mx.init.Zero(), force_reinit=True)
        _set(net, before)


def _reset_ctx(net: Any, step: int) -> None:
    if step == 2:
        net.collect_params().reset_ctx(mx.cpu(0))


def _there_and_back(net: Any, step: int) -> None:
    """Gradients are replaced by others of the same type."""
    if step == 2:
        net.cast("float64")
        net.cast("float32")


def _add_up(net: Any, step: int) -> None:
    if step == -1:
        for param in net.collect_params().values():
            param.grad_req = "add"
    net.collect_params().zero_grad()


def _one_rank_only(net: Any, step: int) -> None:
    """Ranks may differ in where their gradients live."""
    from gluon_esgd import world

    if world().rank == 1:
        _there_and_back(net, step)


def _set(net: Any, values: np.ndarray) -> None:
    start = 0
    for param in net.collect_params().values():
        size = int(np.prod(param.shape))
        param.set_data(mx.nd.array(values[start : start + size].reshape(param.shape)))
        start += size


# And whether gradients are housed before each step's update: yes, no.
SCRIPTS: Dict[str, Tuple[Callable, str]] = {
    "nothing": (_nothing, "yyyyyy"),
    "hybridized": (_hybridize, "yyyyyy"),
    "backward_before": (_backward_before, "nnnnnn"),
    "trained_before": (_trained_before, "ynnnnn"),
    "initialized_again": (_initialize_again, "yyyyyy"),
    "reset_ctx": (_reset_ctx, "yyyyyy"),
    "cast": (_there_and_back, "yynnnn"),
    "add": (_add_up, "nnnnnn"),
}


def _train(script: str) -> Tuple[np.ndarray, str]:
    change = {**SCRIPTS, "one_rank": (_one_rank_only, "")}[script][0]
    net, housed = network(), ""
    change(net, -2)
    trainer = make_trainer(net)
    change(net, -1)
    x, y = batches(STEPS)
    for step in range(STEPS):
        change(net, step)
        housed += "y" if all(_housed(trainer)) else "n"
        train_step(net, trainer, own_share(x[step]), own_share(y[step]))
    return flat(net), housed


def _alone() -> np.ndarray:
    net = network()
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=None)
    for x, y in zip(*batches(STEPS)):
        train_step(net, trainer, x, y)
    return flat(net)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2), Shape(3)], ids=label)
@pytest.mark.parametrize("script", SCRIPTS)
def test_training_is_the_same_wherever_gradients_live(
    pools: Pools, shape: Shape, script: str
) -> None:
    results = pools.get(shape).run(_train, script)
    expected = _alone()
    for weights, housed in results:
        assert np.linalg.norm(weights - expected) < 1e-6 * np.linalg.norm(expected)
        assert housed == SCRIPTS[script][1]
        assert (weights == results[0][0]).all()


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2), Shape(3)], ids=label)
def test_ranks_may_differ_in_where_gradients_live(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_train, "one_rank")
    expected = _alone()
    assert [housed for _, housed in results] == [
        "yynnnn" if r == 1 else "yyyyyy" for r in range(shape.workers)
    ]
    for weights, _ in results:
        assert np.linalg.norm(weights - expected) < 1e-6 * np.linalg.norm(expected)


def _deferred(hybridized: bool = True) -> List[bool]:
    net = network(deferred=True)
    if hybridized:
        net.hybridize()
    trainer = make_trainer(net)
    x, y = batches(2)
    for i in range(2):
        train_step(net, trainer, own_share(x[i]), own_share(y[i]))
    return _housed(trainer)


def _two_graphs() -> Tuple[np.ndarray, np.ndarray]:
    """A static graph that ran backward before, and another one that takes the first step."""

    def train(make: Callable[[Any], Any]) -> np.ndarray:
        mx.random.seed(7)
        first = gluon.nn.HybridSequential()
        first.add(gluon.nn.Dense(4, in_units=3), gluon.nn.Dense(1, in_units=4))
        first.initialize(mx.init.Xavier())
        other = gluon.nn.HybridSequential()
        other.add(*first)
        first.hybridize(static_alloc=True, static_shape=True)
        x = mx.nd.ones((2, 3))
        with autograd.record():
            loss = first(x).sum()
        loss.backward()
        trainer = make(first)
        for step in range(4):
            with autograd.record():
                loss = ((first if step else other)(x * (step + 1)) ** 2).sum()
            loss.backward()
            trainer.step(2)
        return flat(first)

    def plain(net: Any) -> gluon.Trainer:
        return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=None)

    def ours(net: Any) -> Any:
        from gluon_esgd import ElasticTrainer

        return ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01})

    return train(ours), train(plain)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_a_graph_that_ran_before_the_trainer_was_made_keeps_counting(
    pools: Pools, shape: Shape
) -> None:
    for mine, expected in pools.get(shape).run(_two_graphs):
        np.testing.assert_allclose(mine, expected, rtol=1e-5)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_layers_in_a_graph_before_all_are_known_are_packed(pools: Pools, shape: Shape) -> None:
    assert pools.get(shape).run(_deferred, False) == [[False, False, True, True]] * 2


def _gradients_held_by_the_script() -> bool:
    net = network()
    held = [p.grad() for p in net.collect_params().values()]
    trainer = make_trainer(net)
    x, y = batches(2)
    train_step(net, trainer, own_share(x[0]), own_share(y[0]))
    now = [p.grad() for p in net.collect_params().values()]
    return all(a is b and a.asnumpy().any() for a, b in zip(held, now)) and all(_housed(trainer))


def _two_trainers() -> Tuple[str, List[bool]]:
    """A parameter of two trainers lives with the first; the second packs it."""
    net = network()
    first, second = make_trainer(net), make_trainer(net)
    x, y = batches(4)
    for i, trainer in enumerate([first, second, first, second]):
        train_step(net, trainer, own_share(x[i]), own_share(y[i]))
    return digest(net), [*_housed(first), *_housed(second)]


def _half() -> Tuple[List[float], List[bool]]:
    """fp16 gradients, filled by hand, are added up in fp32: 2048 + 1 is no half float."""
    from gluon_esgd import ElasticTrainer, world

    param = gluon.Parameter("w", shape=(3,), dtype="float16")
    param.initialize(mx.init.Zero())
    settings = {"learning_rate": 1.0, "multi_precision": True}
    trainer = ElasticTrainer([param], "sgd", settings)
    with autograd.record():
        loss = (param.data() * 0).sum()
    loss.backward()
    param.grad()[:] = 2048 if world().rank == 0 else 1
    trainer.step(1)
    master = trainer._updaters[0].states[0]
    return [float(v) for v in (param.grad() * world().size).asnumpy()], [
        *_housed(trainer),
        bool(master),
    ]


def _order_of_buckets() -> List[str]:
    """Names of the first parameters of each bucket; sorted by name, 10 would be before 2."""
    from gluon_esgd import ElasticTrainer

    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(12):
            net.add(gluon.nn.Dense(1100, in_units=1100))
    net.initialize()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    return [
        str(bucket).split("(")[1].split("_")[1] for bucket in trainer._replica._reducer._buckets
    ]


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_buckets_are_filled_from_the_last_layer(pools: Pools, shape: Shape) -> None:
    expected = [f"dense{k}" for k in range(11, -1, -2)]
    assert pools.get(shape).run(_order_of_buckets) == [expected] * 2


def _two_devices() -> Tuple[np.ndarray, List[bool]]:
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = network(ctx=ctx)
    trainer = make_trainer(net)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, y in zip(*batches(STEPS)):
        parts = zip(*(gluon.utils.split_and_load(own_share(v), ctx) for v in (x, y)))
        with autograd.record():
            losses = [loss_of(net(a), b) for a, b in parts]
        autograd.backward(losses)
        trainer.step(len(own_share(x)))
    weights = [p.list_data()[0].asnumpy().ravel() for p in net.collect_params().values()]
    return np.concatenate(weights), _housed(trainer)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
@pytest.mark.parametrize("what", [_deferred, _gradients_held_by_the_script])
def test_housed(pools: Pools, shape: Shape, what: Callable) -> None:
    assert all(np.ravel(pools.get(shape).run(what)))


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_a_parameter_of_two_trainers(pools: Pools, shape: Shape) -> None:
    (one, housed), (other, _) = pools.get(shape).run(_two_trainers)
    assert one == other and len(set(housed)) == 2


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_half_gradients_are_packed_and_added_up_in_float32(pools: Pools, shape: Shape) -> None:
    for total, (housed, _) in pools.get(shape).run(_half):
        assert not housed
        assert total == [2048.0] * 3, "2049 rounded once, to even"


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_the_gradient_of_the_first_device_is_housed(pools: Pools, shape: Shape) -> None:
    expected = _alone()
    for weights, housed in pools.get(shape).run(_two_devices):
        assert np.linalg.norm(weights - expected) < 1e-6 * np.linalg.norm(expected)
        assert all(housed)


def _blocked_weights() -> str:
    """Convolution weights that oneDNN has laid out anew are broadcast all the same."""
    from gluon_esgd import world

    mx.random.seed(world().rank)
    net = gluon.model_zoo.vision.get_model("resnet18_v1", classes=10, thumbnail=True)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True)
    net(mx.nd.ones((2, 3, 32, 32)))
    make_trainer(net)
    return digest(net)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_weights_that_were_laid_out_anew_are_broadcast(pools: Pools, shape: Shape) -> None:
    assert len(set(pools.get(shape).run(_blocked_weights))) == 1


def _shared_memory() -> Tuple[int, int, int]:
    """Growth of this rank's shared and private memory by training, and bytes of its gradients."""
    from gluon_esgd import ElasticTrainer

    net = gluon.nn.Dense(3000, in_units=3000)
    net.initialize()
    mx.nd.waitall()
    before, private = _status("RssShmem"), _status("RssAnon")
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for _ in range(2):
        with autograd.record():
            loss = net(mx.nd.ones((1, 3000))).sum()
        loss.backward()
        trainer.step(1)
    mx.nd.waitall()
    gradients = sum(p.grad().size * 4 for p in trainer._params)
    return _status("RssShmem") - before, _status("RssAnon") - private, gradients


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_each_rank_adds_one_vector_of_gradients_to_shared_memory(
    pools: Pools, shape: Shape
) -> None:
    for used, grown, gradients in pools.get(shape).run(_shared_memory):
        # A rank sees its own and its part of the others'.
        assert used < 2.2 * gradients
        assert grown < 0.5 * gradients, "the memory where gradients lived before is given back"


def _end_with_housed_gradients() -> None:
    net = network()
    trainer = make_trainer(net)
    x, y = batches(3)
    for i in range(3):
        train_step(net, trainer, own_share(x[i]), own_share(y[i]))


@pytest.mark.mpi
def test_a_script_ends_well_with_housed_gradients() -> None:
    ended = run_once(Shape(2), _end_with_housed_gradients)
    assert ended.code == 0, ended.output


def test_moving_an_array_keeps_object_and_values() -> None:
    array, memory = mx.nd.array([[1, 2], [3, 4]]), np.zeros(4, np.float32)
    former = move(array, memory)
    array += 1
    mx.nd.waitall()
    assert memory.tolist() == [2, 3, 4, 5] and former.asnumpy().ravel().tolist() == [1, 2, 3, 4]
    assert view(array).ctypes.data == memory.ctypes.data
