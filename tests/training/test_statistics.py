"""Running statistics: every device of every rank gathers its own, readers want one."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer

from ..pool import Pools, Shape, label
from .shapes import ANY_RANKS
from .test_accumulation import backward

PROBE = np.random.RandomState(5).randn(6, 2, 5, 5).astype("f")


class Convolutional(gluon.nn.HybridSequential):
    """A small network with two kinds of running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.add(
            gluon.nn.Conv2D(4, 3, in_channels=2),
            gluon.nn.BatchNorm(in_channels=4),
            gluon.nn.Dense(3, in_units=4 * 9),
        )


def made(devices: int, **kwargs: Any) -> Tuple[Any, Any]:
    mx.random.seed(1)
    net = Convolutional()
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(i) for i in range(devices)])
    settings = {"learning_rate": 0.05, "momentum": 0.9}
    return net, ElasticTrainer(net.collect_params(), "sgd", settings, **kwargs)


def statistics(net: Any) -> List[List[np.ndarray]]:
    """Of each statistic the arrays of all devices."""
    batch_norm = net[1]
    return [
        [array.asnumpy() for array in param.list_data()]
        for param in (batch_norm.running_mean, batch_norm.running_var)
    ]


def set_statistics(net: Any, first: float) -> float:
    """Give each device other ones, from `first` on; return their mean."""
    batch_norm = net[1]
    for param in (batch_norm.running_mean, batch_norm.running_var):
        for i, array in enumerate(param.list_data()):
            array[:] = first + i
    return first + (len(batch_norm.running_mean.list_data()) - 1) / 2


def train(net: Any, trainer: Any, steps: int, seed: int) -> None:
    """On batches of the worker's own, the more spread the higher its number."""
    random = np.random.RandomState(seed)
    for _ in range(steps):
        x = random.randn(8, 2, 5, 5).astype("f") * (1 + seed) + seed
        backward(net, x, random.randint(0, 3, 8))
        trainer.step(8)


def _averaged(devices: int) -> Tuple[List[Any], List[Any]]:
    from gluon_esgd import world

    net, trainer = made(devices)
    train(net, trainer, 3, world().worker_rank)
    before = statistics(net)
    weights = net[0].weight.data().asnumpy()
    trainer.average_running_stats()
    after = statistics(net)
    np.testing.assert_array_equal(net[0].weight.data().asnumpy(), weights)
    trainer.finish()
    return before, after


@pytest.mark.parametrize("devices", [1, 2])
@ANY_RANKS
def test_they_become_their_mean_over_ranks_and_devices(
    pools: Pools, shape: Shape, devices: int
) -> None:
    results = pools.get(shape).run(_averaged, devices)
    size = shape.workers // shape.clients
    for first in range(0, shape.workers, size):
        client = results[first : first + size]
        for i in range(2):
            gathered = np.array([array for before, _ in client for array in before[i]])
            assert gathered.std(0).min() > 0, "all alike before"
            for _, after in client:
                for array in after[i]:
                    np.testing.assert_array_equal(array, client[0][1][i][0])
                    np.testing.assert_allclose(array, gathered.mean(0), rtol=1e-5)


def test_alone_it_is_the_mean_over_devices() -> None:
    net, trainer = made(2)
    mean = set_statistics(net, 1.0)
    trainer.average_running_stats()
    for arrays in statistics(net):
        np.testing.assert_array_equal(arrays, np.full((2, 4), mean))
    net, trainer = made(1)
    train(net, trainer, 2, 1)
    before = statistics(net)
    trainer.average_running_stats()
    np.testing.assert_array_equal(statistics(net), before)


def _without() -> str:
    param = gluon.Parameter("w", shape=(3,), init="zeros")
    param.initialize()
    trainer = ElasticTrainer([param], "sgd")
    trainer.average_running_stats()
    with trainer.center():
        try:
            trainer.average_running_stats()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_a_network_without_them_is_left_alone(pools: Pools, shape: Shape) -> None:
    for said in pools.get(shape).run(_without):
        assert "leave `with trainer.center():`" in said


def _in_center(devices: int) -> Tuple[float, List[Any], List[Any]]:
    """Statistics that are the same at every step, other ones on each rank and device."""
    from gluon_esgd import world

    has_center = world().settings.rule not in (None, "sgd")
    # Clients with the same mean, so that the center's does not depend on who came last.
    rank = world().rank if has_center else world().worker_rank
    net, trainer = made(devices, **({"interval": 1, "beta": 0.9} if has_center else {}))
    train(net, trainer, 1, world().worker_rank)
    for _ in range(60 if has_center else 1):
        mean = set_statistics(net, 10.0 * rank)
        trainer.step(8, ignore_stale_grad=True)
    trainer.finish()
    own = statistics(net)
    with trainer.center(sync=True):
        shown = statistics(net)
    np.testing.assert_array_equal(statistics(net), own)
    return mean, shown, own


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        *(
            pytest.param(Shape(4, 2, 1, rule), marks=pytest.mark.servers)
            for rule in ("sgd", "asgd", "esgd")
        ),
    ],
    ids=label,
)
def test_the_center_has_their_mean_over_ranks_and_devices(
    pools: Pools, shape: Shape, devices: int
) -> None:
    results = pools.get(shape).run(_in_center, devices)
    expected = np.mean([mean for mean, *_ in results])
    for rank, (_, shown, own) in enumerate(results):
        np.testing.assert_allclose(shown, np.full((2, devices, 4), expected), rtol=1e-4)
        assert rank % 2 == 0 or abs(np.mean(own) - expected) > 1, "a client's own were touched"


def _evaluated(devices: int) -> Dict[str, Any]:
    """Field report 16: what does each rank report for the same data?"""
    from gluon_esgd import world

    interval = {} if world().settings.rule in (None, "sgd") else {"interval": 3}
    net, trainer = made(devices, **interval)
    train(net, trainer, 8, world().worker_rank)
    own = outputs(net)
    with trainer.center(sync=True):
        shown = outputs(net)
    trainer.finish()
    return {"own": own[0], "shown": shown}


def outputs(net: Any) -> List[np.ndarray]:
    """Of the probe, on each device."""
    contexts = net[0].weight.list_ctx()
    return [net(mx.nd.array(PROBE, ctx=ctx)).asnumpy() for ctx in contexts]


@pytest.mark.parametrize("devices", [1, 2])
@ANY_RANKS
def test_evaluation_in_the_center_gives_one_number_on_all_ranks(
    pools: Pools, shape: Shape, devices: int
) -> None:
    results = pools.get(shape).run(_evaluated, devices)
    first = results[0]["shown"][0]
    for result in results:
        for shown in result["shown"]:
            np.testing.assert_array_equal(shown, first)
    assert np.abs(results[1]["own"] - results[0]["own"]).max() > 1e-3, "nothing to average"
