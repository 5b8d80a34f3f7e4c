"""Gluon's Estimator with an ElasticTrainer: in one process, in a client, in several."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon.contrib.estimator import Estimator, event_handler

from gluon_esgd import ElasticTrainer, world
from gluon_esgd import estimator as estimator_module
from gluon_esgd.estimator import CheckpointHandler, EarlyStoppingHandler
from gluon_esgd.metrics import OverRanks

from .pool import Pools, Shape, label
from .training.problems import batches, digest, flat, network, shares

SETTINGS = {"learning_rate": 0.1, "momentum": 0.9}
STEPS, BATCH = 6, 8  # of an epoch, over all ranks

SHAPES = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 1, "esgd"), marks=pytest.mark.servers),
    ],
    ids=label,
)


def loader(rank: int, size: int) -> gluon.data.DataLoader:
    """A rank's part of each batch, in one order."""
    x, y = batches(STEPS, BATCH)
    mine = shares(BATCH, [1] * size)[rank]
    data = gluon.data.ArrayDataset(x[:, mine].reshape(-1, x.shape[-1]), y[:, mine].reshape(-1))
    return gluon.data.DataLoader(data, BATCH // size)


def made(trainer_class: type = ElasticTrainer, **kwargs: Any) -> Estimator:
    net = network()
    extra = {"interval": 4} if world().settings.num_servers else {}
    trainer = trainer_class(net.collect_params(), "sgd", dict(SETTINGS), **extra)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    return Estimator(net, loss, trainer=trainer, context=mx.cpu(), **kwargs)


def run(estimator: Estimator, handlers: Sequence[Any] = (), **length: int) -> Estimator:
    """Train this rank's part, validated on it too."""
    me = world()
    train = loader(me.rank, me.size)
    estimator.fit(train, val_data=train, event_handlers=[*handlers], **length)
    return estimator


def test_alone_it_is_gluon_to_the_bit() -> None:
    ours, theirs = (run(made(kind), epochs=2) for kind in (ElasticTrainer, gluon.Trainer))
    np.testing.assert_array_equal(flat(ours.net), flat(theirs.net))
    assert ours.trainer.counters.steps == 2 * STEPS
    names = [[m.get() for m in e.train_metrics + e.val_metrics] for e in (ours, theirs)]
    assert names[0] == names[1]


def _fitted(epochs: Optional[int], steps: Optional[int]) -> Tuple[np.ndarray, List[Any], int]:
    metrics = [OverRanks(mx.metric.Accuracy()), OverRanks(mx.metric.Loss("loss"))]
    estimator = made(train_metrics=metrics)
    length = {"epochs": epochs} if epochs else {"batches": steps}
    run(estimator, **length)
    weights = flat(estimator.net)
    values = [m.get() for m in estimator.train_metrics + estimator.val_metrics]
    estimator.trainer.finish()
    return weights, values, estimator.trainer.counters.steps


@pytest.mark.parametrize(("epochs", "steps"), [(2, None), (None, STEPS + 3)])
@SHAPES
def test_ranks_train_together_and_log_the_same(
    pools: Pools, shape: Shape, epochs: Optional[int], steps: Optional[int]
) -> None:
    size = shape.workers // shape.clients
    results = pools.get(shape).run(_fitted, epochs, steps)
    for first in range(0, shape.workers, size):
        for weights, values, taken in results[first : first + size]:
            np.testing.assert_array_equal(weights, results[first][0])
            assert repr(values) == repr(results[first][1]) and taken == (steps or 2 * STEPS)
    if shape.clients == 1:
        metrics = [mx.metric.Accuracy(), mx.metric.Loss("loss")]
        alone = made(gluon.Trainer, train_metrics=metrics)
        run(alone, **({"epochs": epochs} if epochs else {"batches": steps}))
        np.testing.assert_allclose(results[0][0], flat(alone.net), rtol=2e-5, atol=1e-6)
        expected = [m.get() for m in alone.train_metrics + alone.val_metrics]
        for (name, value), (also, theirs) in zip(results[0][1], expected):
            assert name == also and value == pytest.approx(theirs, rel=1e-5, nan_ok=True)


class Scripted(mx.metric.EvalMetric):
    """What a rank sees in epoch e is ``values[e]``."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values, self.epoch = values, -2  # made, then reset at each epoch's begin
        super().__init__("scripted", has_global_stats=True)

    def reset(self) -> None:
        super().reset()
        self.epoch += 1

    def update(self, labels: Any, preds: Any) -> None:
        self.sum_metric += self.values[self.epoch % len(self.values)]
        self.num_inst += 1


# Rank 0 sees a metric that falls from the start, others one that rises: together up to epoch 2.
FALLING, RISING = [9, 8, 7, 0, 0, 0, 0, 0], [1, 4, 7, 8, 9, 10, 11, 12]


def _stopped(kind: str) -> Tuple[int, str]:
    mine = FALLING if world().rank == 0 else RISING
    estimator = made(train_metrics=[Scripted(mine)])
    monitor = estimator.train_metrics[0]
    if kind == "ours":
        handler = EarlyStoppingHandler(monitor, patience=1, mode="max")
    else:
        handler = event_handler.EarlyStoppingHandler(OverRanks(monitor), patience=1, mode="max")
    run(estimator, [handler], epochs=8)
    estimator.trainer.finish()
    return estimator.trainer.counters.steps, digest(estimator.net)


@pytest.mark.parametrize("kind", ["ours", "gluon"])
@SHAPES
def test_ranks_stop_at_the_same_epoch(pools: Pools, shape: Shape, kind: str) -> None:
    # Means are 5, 6, 7, 4: the fourth epoch is the first that is no better.
    results = pools.get(shape).run(_stopped, kind)
    assert [steps for steps, _ in results] == [4 * STEPS] * shape.workers
    assert results[0] == results[1]


class Watch(event_handler.TrainBegin):
    """What a run starts from, after everybody else has made up their mind."""

    priority = 1000

    def train_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        self.weights, self.epochs = flat(estimator.net), estimator.max_epoch


def _checkpointed(folder: str, epochs: int, resume: bool) -> Dict[str, Any]:
    estimator = made()
    settings = {"save_best": True, "mode": "max", "max_checkpoints": 2}
    monitor = estimator.train_metrics[0]
    files = CheckpointHandler(folder, monitor=monitor, resume_from_checkpoint=resume, **settings)
    watch = Watch()
    run(estimator, [files, watch], epochs=epochs)
    weights = flat(estimator.net)
    estimator.trainer.finish()
    return {"start": watch.weights, "epochs": watch.epochs, "weights": weights}


def _saved_weights(path: str) -> np.ndarray:
    saved = mx.nd.load(path)
    order = network()._collect_params_with_prefix()
    return np.concatenate([saved[name].asnumpy().ravel() for name in order])


def check_resume(first: Any, second: Any, whole: Any, folder: str, suffix: str = "") -> None:
    """A client's ranks, or one process: three epochs, then resumed until five."""
    for result in first:
        np.testing.assert_array_equal(result["weights"], first[0]["weights"])
    for result in second:
        assert result["epochs"] == 2, "not those that are left"
        np.testing.assert_array_equal(result["start"], first[0]["weights"])
        np.testing.assert_array_equal(result["weights"], whole[0]["weights"])
    last = os.path.join(folder, f"model-epoch4batch{5 * STEPS}.params{suffix}")
    found = [n for n in os.listdir(folder) if n.endswith(f".params{suffix}") and "epoch" in n]
    assert os.path.exists(last) and len(found) == 4, found  # two of each run
    np.testing.assert_array_equal(_saved_weights(last), whole[0]["weights"])
    assert os.path.exists(os.path.join(folder, f"model-best.params{suffix}"))
    assert not [n for n in os.listdir(folder) if "writing" in n]


def test_alone_a_run_is_resumed(tmp_path: Any) -> None:
    folder = str(tmp_path)
    first, second = _checkpointed(folder, 3, False), _checkpointed(folder, 5, True)
    check_resume([first], [second], [_checkpointed(str(tmp_path / "whole"), 5, False)], folder)
    with pytest.raises(ValueError, match="has a checkpoint after 5 of 5 epochs: nothing is left"):
        _checkpointed(folder, 5, True)
    assert _checkpointed(str(tmp_path / "new"), 1, True)["epochs"] == 1


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_a_client_is_resumed(pools: Pools, shape: Shape, tmp_path: Any) -> None:
    pool, folder = pools.get(shape), str(tmp_path / "files")
    first, second = (pool.run(_checkpointed, folder, *args) for args in ((3, False), (5, True)))
    whole = pool.run(_checkpointed, str(tmp_path / "whole"), 5, False)
    check_resume(first, second, whole, folder)


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, 2, 1, "esgd")], ids=label)
def test_each_client_has_its_own_files(pools: Pools, shape: Shape, tmp_path: Any) -> None:
    results = pools.get(shape).run(_checkpointed, str(tmp_path), 2, False)
    names = sorted(n for n in os.listdir(tmp_path) if ".params" in n)
    assert [n.count(".client1") for n in names] == [0, 1] * 3
    for client in (0, 1):
        suffix = f".client{client}" if client else ""
        path = str(tmp_path / f"model-epoch1batch{2 * STEPS}.params{suffix}")
        for result in results[2 * client : 2 * client + 2]:
            np.testing.assert_array_equal(_saved_weights(path), result["weights"])


def test_clients_go_on_from_the_newest_checkpoint_that_all_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(estimator_module, "world", lambda: SimpleNamespace(client=1, num_clients=2))
    handler = CheckpointHandler(str(tmp_path))
    assert handler._newest() is None
    for name in ("epoch0batch6", "epoch10batch66", "epoch9batch60", "epoch11batch72.writing"):
        (tmp_path / f"model-{name}.params").touch()
    (tmp_path / "model-epoch12batch78.params.client11").touch()
    assert handler._newest() == [10, 66], "a client without files takes those of client 0"
    (tmp_path / "model-epoch9batch60.params.client1").touch()
    assert handler._newest() == [9, 60]
    (tmp_path / "model-epoch11batch72.params.client1").touch()
    assert handler._newest() == [9, 60], "client 0 has not come so far"


def _unreadable(folder: str) -> str:
    estimator = made()
    files = CheckpointHandler(folder, resume_from_checkpoint=True)
    try:
        run(estimator, [files], epochs=9)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(
    pools: Pools, shape: Shape, tmp_path: Any
) -> None:
    (tmp_path / "model-epoch0batch6.params").mkdir()
    for text in pools.get(shape).run(_unreadable, str(tmp_path)):
        assert "Is a directory" in text and "model-epoch0batch6.params" in text


def _hybrid(folder: str) -> List[str]:
    """A network with running statistics; the file has their mean."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=6), gluon.nn.BatchNorm(in_channels=4), gluon.nn.Dense(3))
    net.initialize()
    net.hybridize()
    trainer = ElasticTrainer(net.collect_params(), "sgd", dict(SETTINGS))
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    estimator = Estimator(net, loss, trainer=trainer, context=mx.cpu())
    run(estimator, [CheckpointHandler(folder)], epochs=1)
    own = net[1].running_mean.data().asnumpy()
    trainer.finish()
    saved = mx.nd.load(os.path.join(folder, f"model-epoch0batch{STEPS}.params"))
    np.testing.assert_array_equal(saved["1.running_mean"].asnumpy(), own)
    return [own.tobytes().hex(), *sorted(os.listdir(folder))]


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_a_checkpoint_has_the_mean_of_running_statistics(
    pools: Pools, shape: Shape, tmp_path: Any
) -> None:
    first, second = pools.get(shape).run(_hybrid, str(tmp_path))
    assert first == second and "model-symbol.json" in first
