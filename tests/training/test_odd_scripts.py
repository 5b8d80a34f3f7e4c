"""What scripts also do: on ranks that bring the same data it comes out as under plain Gluon."""

from __future__ import annotations

import gc
import os
from typing import Any, Callable, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from ..pool import Pools, Shape, label, run_once
from .problems import flat

Make = Callable[..., Any]  # of parameters and an optimizer's settings, a trainer


def _plain(params: Any, **settings: Any) -> gluon.Trainer:
    return gluon.Trainer(params, "sgd", settings, kvstore=None)


def _ours(params: Any, **settings: Any) -> Any:
    from gluon_esgd import ElasticTrainer

    return ElasticTrainer(params, "sgd", settings)


def _mlp(*units: int, static: bool = False, prefix: str = "") -> gluon.nn.HybridSequential:
    net = gluon.nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        for inputs, outputs in zip(units, units[1:]):
            net.add(gluon.nn.Dense(outputs, activation="tanh", in_units=inputs))
    mx.random.seed(5)
    net.initialize(mx.init.Xavier())
    if static:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


def _step(net: Callable, trainer: Any, number: int, **step: Any) -> None:
    x = mx.nd.array(np.random.RandomState(number).randn(4, 3))
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()
    trainer.step(4, **step)


def _float64(make: Make) -> np.ndarray:
    net = _mlp(3, 4, 2)
    net.cast("float64")
    trainer = make(net.collect_params(), learning_rate=0.1)
    for number in range(3):
        _step(lambda x: net(x.astype("float64")), trainer, number)
    return flat(net)


def _initialized_in_each_step(make: Make) -> np.ndarray:
    """The step before may still be in flight."""
    net = _mlp(3, 2000, 200, 2)
    trainer = make(net.collect_params(), learning_rate=0.1, momentum=0.9)
    for number in range(4):
        _step(net, trainer, number)
        mx.random.seed(number)
        net.initialize(mx.init.Normal(0.1), force_reinit=True)
        _step(net, trainer, number)
    return flat(net)


def _second_trainer(make: Make) -> np.ndarray:
    """Its first steps leave a head out that a static graph writes elsewhere."""
    body, one, other = _mlp(3, 6, static=True), _mlp(6, 2, static=True), _mlp(6, 2, static=True)
    params = body.collect_params()
    for head in (one, other):
        params.update(head.collect_params())
    for heads in ([one, other, one], [one, one, one, other, other]):
        trainer = make(params, learning_rate=0.1)
        for number, head in enumerate(heads):
            _step(lambda x, head=head: head(body(x)), trainer, number, ignore_stale_grad=True)
        if hasattr(trainer, "finish"):
            trainer.finish()
        del trainer
        gc.collect()
        params.zero_grad()
    return np.concatenate([flat(net) for net in (body, one, other)])


def _frozen_for_a_while(make: Make) -> np.ndarray:
    net = _mlp(3, 5, 2, static=True)
    trainer = make(net.collect_params(), learning_rate=0.1)
    for number in range(6):
        # The whole layer: MXNet leaves a bias without gradient where only the weight is frozen.
        net[0].collect_params().setattr("grad_req", "null" if number in (2, 3) else "write")
        _step(net, trainer, number)
    return flat(net)


def _made_after_the_forward_pass(make: Make) -> np.ndarray:
    net = _mlp(3, 4, 2)
    x = mx.nd.ones((4, 3))
    with autograd.record():
        loss = (net(x) ** 2).sum()
    trainer = make(net.collect_params(), learning_rate=0.1)
    loss.backward()
    trainer.step(4)
    _step(net, trainer, 1)
    return flat(net)


def _first_layer_adds_nothing(make: Make) -> np.ndarray:
    """Gradients are zeros in the first steps, as behind a BatchNorm whose gamma is 0."""
    net = _mlp(3, 4, 2)
    net[1].weight.set_data(mx.nd.zeros((2, 4)))
    trainer = make(net.collect_params(), learning_rate=0.1)
    for number in range(4):
        x = mx.nd.array(np.random.RandomState(number).randn(4, 3))
        with autograd.record():
            loss = (net(x) - 1).sum()
        loss.backward()
        trainer.step(4)
    return flat(net)


def _used_late_on_one_rank(make: Make) -> np.ndarray:
    """Others use a head before rank 0 does, where a static graph writes as it used to."""
    from gluon_esgd import world

    one, other = _mlp(3, 2, static=True), _mlp(3, 2, static=True)
    params = one.collect_params()
    params.update(other.collect_params())
    warm = _plain(params, learning_rate=0.1)
    for head in (one, other):
        _step(head, warm, 0, ignore_stale_grad=True)
    params.zero_grad()
    trainer = make(params, learning_rate=0.1)
    rank, size, ours = world().rank, world().size, make is _ours
    for number in range(5):
        x = mx.nd.array(np.random.RandomState(number).randn(4, 3))
        share = (size - 1) / size if number < 2 else 1  # of the ranks that use the second head
        with autograd.record():
            loss = (one(x) ** 2).sum()
            if not ours:
                loss = loss + share * (other(x) ** 2).sum()
            elif number >= 2 or rank > 0:
                loss = loss + (other(x) ** 2).sum()
        loss.backward()
        trainer.step(4, ignore_stale_grad=True)
    return np.concatenate([flat(one), flat(other)])


SCRIPTS = [
    _float64,
    _initialized_in_each_step,
    _second_trainer,
    _frozen_for_a_while,
    _made_after_the_forward_pass,
    _first_layer_adds_nothing,
    _used_late_on_one_rank,
]


def _both(script: Callable[[Make], np.ndarray]) -> Tuple[np.ndarray, np.ndarray]:
    return script(_ours), script(_plain)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2), Shape(3)], ids=label)
@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_are_those_of_plain_gluon(pools: Pools, shape: Shape, script: Callable) -> None:
    results = pools.get(shape).run(_both, script)
    for mine, expected in results:
        np.testing.assert_allclose(mine, expected, rtol=2e-5, atol=1e-6)
        assert (mine == results[0][0]).all(), "ranks differ"


def _imported(folder: str) -> bool:
    """Parameters of a SymbolBlock have no shape of their own."""
    from gluon_esgd import world

    net = _mlp(3, 2)
    net.hybridize()
    net(mx.nd.zeros((1, 3)))
    path = os.path.join(folder, str(world().rank))
    net.export(path)
    block = gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")
    before = [p.data().asnumpy().copy() for p in block.collect_params().values()]
    _step(block, _ours(block.collect_params(), learning_rate=0.1), 0)
    after = [p.data().asnumpy() for p in block.collect_params().values()]
    return all((a != b).any() for a, b in zip(before, after))


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
@pytest.mark.filterwarnings("ignore")
def test_an_imported_network_trains(pools: Pools, shape: Shape, tmp_path: Any) -> None:
    assert pools.get(shape).run(_imported, str(tmp_path)) == [True, True]


def _with_np_arrays() -> None:
    from mxnet import npx

    from gluon_esgd import world

    npx.set_np()
    mx.random.seed(world().rank)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.BatchNorm(), gluon.nn.Dense(2))  # initialized in the first forward pass
    net.initialize(mx.init.Xavier())
    trainer = _ours(net.collect_params(), learning_rate=0.1)
    random = np.random.RandomState(world().rank)
    for _ in range(3):
        x = mx.np.array(random.rand(4, 3), dtype="float32")
        with autograd.record():
            loss = (net(x) ** 3).sum()
        loss.backward()
        trainer.step(4)
    trainer.average_running_stats()
    params = [p.data().asnumpy().tolist() for p in net.collect_params().values()]
    print(f"weight {params}\n", end="", flush=True)


@pytest.mark.mpi
def test_np_arrays_train() -> None:
    ended = run_once(Shape(2), _with_np_arrays)
    assert ended.code == 0, ended.output
    said = [line for line in ended.output.splitlines() if line.startswith("weight ")]
    assert len(said) == 2 and len(set(said)) == 1


def _given_up() -> List[int]:
    """Open files after some trainers, and after many more, none of them finished."""
    counts = []
    for several in (5, 40):
        for number in range(several):
            net = _mlp(3, 2)
            _step(net, _ours(net.collect_params(), learning_rate=0.1), number)
        mx.nd.waitall()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_trainers_that_were_given_up_are_gone(pools: Pools, shape: Shape) -> None:
    for few, many in pools.get(shape).run(_given_up):
        assert many < few + 10
