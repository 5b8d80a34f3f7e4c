"""States go to other numbers of ranks and contexts, other rules, types and formats."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer, world

from ..pool import Pools, Shape
from .problems import BATCH, batches, digest, flat, network, shares, train_step
from .states import (
    INTERVAL,
    SAVED,
    STEPS,
    make,
    momentum,
    parameters,
    resume,
    save,
    step,
    train,
    uninterrupted,
    values,
)


def _saved_by(folder: str) -> bytes:
    net = network()
    trainer = make("adam", net)
    train(net, trainer, 0, SAVED)
    save(net, trainer, folder)
    remembered = momentum(trainer)
    train(net, trainer, SAVED, STEPS)
    trainer.finish()
    return flat(net).tobytes() + remembered


def _loaded_by(folder: str, contexts: int) -> List[Tuple[np.ndarray, bytes]]:
    places = [mx.cpu(i) for i in range(contexts)]
    net = network(seed=4, ctx=places)
    trainer = ElasticTrainer(
        net.collect_params(), "adam", {"learning_rate": 0.9}, update_on_kvstore=False
    )
    net.load_parameters(os.path.join(folder, "net0"), ctx=places)
    trainer.load_states(os.path.join(folder, "states"))
    remembered = [momentum(trainer, device) for device in range(contexts)]
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    mine = shares(BATCH, [1] * world().size)[world().rank]
    x, y = batches()
    for i in range(SAVED, STEPS):
        parts = gluon.utils.split_and_load(mx.nd.array(x[i][mine]), places)
        labels = gluon.utils.split_and_load(mx.nd.array(y[i][mine]), places)
        with mx.autograd.record():
            losses = [loss_of(net(a), b) for a, b in zip(parts, labels)]
        for loss in losses:
            loss.backward()
        trainer.step(len(x[i][mine]))
    trainer.finish()
    params = list(net.collect_params().values())
    return [
        (np.concatenate([p.data(place).asnumpy().ravel() for p in params]), kept)
        for place, kept in zip(places, remembered)
    ]


OTHERS = [
    pytest.param(Shape(2), Shape(3), 1, id="2 to 3"),
    pytest.param(Shape(2), None, 1, id="2 to 1"),
    pytest.param(Shape(2), None, 2, id="2 to 1 with 2 contexts"),
    pytest.param(Shape(2), Shape(2), 2, id="2 to 2 with 2 contexts"),
    pytest.param(None, Shape(3), 1, id="1 to 3"),
    pytest.param(None, Shape(2), 2, id="1 to 2 with 2 contexts"),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("shape", "other", "contexts"), OTHERS)
def test_any_number_of_ranks_and_contexts_loads(
    pools: Pools, shape: Any, other: Any, contexts: int, tmp_path: Path
) -> None:
    """One rank writes Gluon's own file, several ours."""
    folder = str(tmp_path)
    said = _saved_by(folder) if shape is None else pools.get(shape).run(_saved_by, folder)[0]
    results = [_loaded_by(folder, contexts)] if other is None else pools.get(other).run(
        _loaded_by, folder, contexts
    )  # fmt: skip
    size = network().collect_params()
    count = sum(p.data().size for p in size.values())
    whole, remembered = np.frombuffer(said[: 4 * count], "f"), said[4 * count :]
    for result in results:
        for weights, kept in result:
            assert kept == remembered
            np.testing.assert_allclose(weights, whole, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(weights, results[0][0][0])


def _from_gluon(folder: str, bare: bool) -> Dict[str, Any]:
    net = network(seed=3)
    settings = {"learning_rate": 0.9, "momentum": 0.9 if bare else 0.0}
    trainer = ElasticTrainer(net.collect_params(), "sgd", settings, interval=INTERVAL)
    net.load_parameters(os.path.join(folder, "net"))
    trainer.load_states(os.path.join(folder, "states"))
    found = {
        "momentum": momentum(trainer),
        "rate": trainer.learning_rate,
        "step": trainer._replica._step,
        "kept": trainer.optimizer.momentum,
    }
    train(net, trainer, SAVED, SAVED + 1)
    trainer.finish()
    return found


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 1, "esgd"), marks=pytest.mark.servers),
        pytest.param(Shape(4, 2, 1, "sgd"), marks=pytest.mark.servers),
    ],
)
def test_a_file_of_plain_gluon_loads(
    pools: Pools, shape: Shape, bare: bool, tmp_path: Path
) -> None:
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    x, y = batches()
    for i in range(SAVED):
        train_step(net, trainer, x[i], y[i])
    net.save_parameters(str(tmp_path / "net"))
    (tmp_path / "states").write_bytes(trainer._updaters[0].get_states(dump_optimizer=not bare))
    for found in pools.get(shape).run(_from_gluon, str(tmp_path), bare):
        assert found["momentum"] == momentum(trainer)
        assert found["kept"] == 0.9
        assert (found["rate"], found["step"]) == ((0.9, 0) if bare else (0.1, SAVED))


def _on_the_leader_only(folder: str) -> Tuple[bool, bytes, bytes]:
    """Each rank in a folder of its own, with one relative name."""
    before = os.getcwd()
    os.makedirs(os.path.join(folder, str(world().rank)))
    os.chdir(os.path.join(folder, str(world().rank)))
    try:
        net = network()
        trainer = make("momentum", net)
        train(net, trainer, 0, SAVED)
        trainer.save_states("states")
        again = network()
        resumed = make("momentum", again, 0.9)
        resumed.load_states("states")
        return os.path.exists("states"), momentum(resumed), momentum(trainer)
    finally:
        os.chdir(before)


@pytest.mark.mpi
def test_only_the_leader_needs_the_file(pools: Pools, tmp_path: Path) -> None:
    results = pools.get(Shape(2)).run(_on_the_leader_only, str(tmp_path))
    assert [there for there, _, _ in results] == [True, False]
    assert results[0][1] == results[1][1] == results[0][2] != b""


def _half_precision(folder: str) -> List[List[bytes]]:
    """fp16 weights with fp32 masters, before, after loading, and some steps later in both."""
    seen: List[List[bytes]] = []
    trainers = []
    settings = {"momentum": 0.9, "multi_precision": True}
    interval = {"interval": INTERVAL} if world().settings.num_servers else {}
    for rate in (0.1, 0.9):
        params = parameters("float16")
        trainers.append(
            ElasticTrainer(params, "sgd", dict(settings, learning_rate=rate), **interval)
        )
    fname = os.path.join(folder, "states")

    def look() -> None:
        seen.append([values(t._params) + momentum(t) for t in trainers])

    for number in range(SAVED):
        step(trainers[0]._params, trainers[0], number)
    trainers[0].save_states(fname)
    for one, other in zip(trainers[0]._params, trainers[1]._params):
        other.set_data(one.data())
    trainers[1].load_states(fname)
    look()
    for number in range(SAVED, STEPS):
        for trainer in trainers:
            step(trainer._params, trainer, number)
    look()
    for trainer in trainers:
        trainer.finish()
    return seen


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        pytest.param(Shape(2, 1, 1, "esgd"), marks=pytest.mark.servers),
        pytest.param(Shape(2, 1, 1, "asgd"), marks=pytest.mark.servers),
    ],
)
def test_masters_of_half_precision_weights_come_back(
    pools: Pools, shape: Shape, tmp_path: Path
) -> None:
    results = pools.get(shape).run(_half_precision, str(tmp_path))
    for loaded, later in results:
        assert loaded[0] == loaded[1] and later[0] == later[1]
        assert (loaded, later) == tuple(results[0])


def _deferred(folder: str) -> Tuple[bytes, bytes]:
    """Loaded before the parameters have a shape."""
    net = network(deferred=True)
    trainer = make("momentum", net, 0.9)
    trainer.load_states(os.path.join(folder, "states"))
    net.load_parameters(os.path.join(folder, "net0"))
    train(net, trainer, SAVED, STEPS)
    return flat(net).tobytes(), momentum(trainer)


@pytest.mark.mpi
def test_deferred_parameters(pools: Pools, tmp_path: Path) -> None:
    pool = pools.get(Shape(2))
    whole = pool.run(uninterrupted, str(tmp_path), "momentum", 1)
    for weights, remembered in pool.run(_deferred, str(tmp_path)):
        assert (weights, remembered) == (whole[0][0], whole[0][2])


def _scaler(folder: str) -> Tuple[float, float, int]:
    from mxnet.contrib.amp.loss_scaler import LossScaler

    trainers = [make("momentum", network()) for _ in range(2)]
    for trainer in trainers:
        trainer._amp_loss_scaler = LossScaler()
    scaler = trainers[0]._amp_loss_scaler
    scaler._loss_scale, scaler._next_loss_scale, scaler._unskipped = 512.0, 1024.0, 77
    trainers[0].save_states(os.path.join(folder, "states"))
    trainers[1].load_states(os.path.join(folder, "states"))
    other = trainers[1]._amp_loss_scaler
    return other._loss_scale, other._next_loss_scale, other._unskipped


@pytest.mark.mpi
def test_the_loss_scale_comes_back(pools: Pools, tmp_path: Path) -> None:
    assert pools.get(Shape(2)).run(_scaler, str(tmp_path)) == [(512.0, 1024.0, 77)] * 2


@pytest.mark.servers
def test_a_file_goes_from_one_rule_to_another(pools: Pools, tmp_path: Path) -> None:
    for one, other in (("esgd", "asgd"), ("asgd", "esgd")):
        folder = tmp_path / one
        folder.mkdir()
        pools.get(Shape(2, 1, 1, one)).run(uninterrupted, str(folder), "momentum", 1)
        resumed = pools.get(Shape(2, 1, 1, other)).run(resume, str(folder), "momentum", 1)
        assert resumed[0] == resumed[1]
        shutil.rmtree(folder)
    assert digest(network()) == digest(network())
