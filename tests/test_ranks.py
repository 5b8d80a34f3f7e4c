"""What scripts do with the ranks of their client by themselves."""

from __future__ import annotations

import datetime
import time
from typing import Any, Callable, Dict, List

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import gluon_esgd

from .pool import Pools, Shape
from .training.problems import digest, network
from .training.shapes import ANY_RANKS

TWO = pytest.mark.parametrize("shape", [pytest.param(Shape(2), marks=pytest.mark.mpi)], ids=["2"])
PLAIN = {"when": datetime.date(2026, 1, 2), "shape": (1, 2), 3: np.arange(4)}


def _object() -> Any:
    from gluon_esgd import broadcast_object, world

    mine = PLAIN if world().is_leader else object()
    mine = {**mine, "client": world().client} if world().is_leader else mine
    got = broadcast_object(mine)
    large = broadcast_object(np.full(300_000, world().client) if world().is_leader else None)
    return got, int(large.sum())


@ANY_RANKS
def test_an_object_comes_as_what_it_was(pools: Pools, shape: Shape) -> None:
    size = shape.workers // shape.clients
    for worker, (got, total) in enumerate(pools.get(shape).run(_object)):
        assert got["client"] == worker // size and total == got["client"] * 300_000
        assert got["shape"] == (1, 2) and got["when"] == PLAIN["when"]
        np.testing.assert_array_equal(got[3], PLAIN[3])


class OnlyHere:
    """Can be pickled and not be read."""

    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise ImportError("no such class here")


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing"


def _bad_objects() -> List[str]:
    from gluon_esgd import broadcast_object, world

    leader = world().is_leader
    return [
        said(lambda: broadcast_object((lambda: 0) if leader else None)),
        said(lambda: broadcast_object(OnlyHere() if leader else None)),
        said(lambda: broadcast_object(1)),
    ]


@TWO
def test_an_object_that_cannot_travel_is_an_error_on_all_ranks(pools: Pools, shape: Shape) -> None:
    for pickled, read, fine in pools.get(shape).run(_bad_objects):
        assert "broadcast_object: rank 0: obj of type function cannot be pickled" in pickled
        assert "rank 1: the leader's object cannot be read: ImportError('no such class" in read
        assert fine == "nothing", "the ranks are out of step"


def test_alone_an_object_is_itself() -> None:
    mine = object()
    assert gluon_esgd.broadcast_object(mine) is mine
    gluon_esgd.barrier()


def _barrier() -> List[float]:
    from gluon_esgd import barrier, world

    if world().rank == 0:
        time.sleep(0.3)  # the one that the others wait for
    start = time.monotonic()
    barrier()
    return [start, time.monotonic()]


@TWO
def test_nobody_leaves_a_barrier_before_all_have_come(pools: Pools, shape: Shape) -> None:
    times = pools.get(shape).run(_barrier)
    assert max(came for came, _ in times) <= min(left for _, left in times)


def _parameters(kind: str) -> List[str]:
    from gluon_esgd import broadcast_parameters, world

    net = network(seed=world().worker_rank, ctx=[mx.cpu(0), mx.cpu(1)])
    params: Any = net.collect_params()
    if kind == "list":
        for i, param in enumerate(params.values()):
            param.name = f"w{i}"
        params = list(params.values())
    elif kind == "arrays":
        params = {str(i): p.data() for i, p in enumerate(params.values())}
    else:  # in any order
        items = list(net._collect_params_with_prefix().items())
        params = dict(reversed(items) if world().rank else items)
    broadcast_parameters(params)
    second = [p.data(mx.cpu(1)).asnumpy().tobytes() for p in net.collect_params().values()]
    first = [p.data(mx.cpu(0)).asnumpy().tobytes() for p in net.collect_params().values()]
    assert kind == "arrays" or first == second
    return [digest(net)]


@pytest.mark.parametrize("kind", ["list", "arrays", "structure"])
@ANY_RANKS
def test_parameters_become_the_leaders(pools: Pools, shape: Shape, kind: str) -> None:
    results = pools.get(shape).run(_parameters, kind)
    size = shape.workers // shape.clients
    for first in range(0, shape.workers, size):
        assert results[first : first + size] == [results[first]] * size
    assert shape.clients == 1 or results[0] != results[-1], "clients are not to know each other"


def _bad_parameters() -> List[str]:
    from gluon_esgd import broadcast_parameters, world

    second = world().rank == 1

    def param(name: str = "w", shape: Any = (2, 3), **kwargs: Any) -> gluon.Parameter:
        made = gluon.Parameter(name, shape=shape, init="zeros", **kwargs)
        made.initialize(mx.init.Zero())
        return made

    def deferred() -> gluon.Parameter:
        return param("late", (2, 0), allow_deferred_init=True)

    arrays: Dict[str, Any] = {"a": mx.nd.zeros(2)}
    return [
        said(lambda: broadcast_parameters([param(), deferred() if second else param("late")])),
        said(lambda: broadcast_parameters([param(), param("b" if second else "a")])),
        said(lambda: broadcast_parameters([param(shape=(2, 3 + second))])),
        said(lambda: broadcast_parameters([param()] * (1 + second))),
        said(lambda: broadcast_parameters([mx.nd.zeros(2)] if second else [param("a")])),
        said(lambda: broadcast_parameters({**arrays, "b": 1.0 if second else mx.nd.ones(2)})),
        said(lambda: broadcast_parameters({"a": arrays["a"].tostype("row_sparse")})),
        said(lambda: broadcast_parameters(arrays)),
    ]


@TWO
def test_parameters_that_cannot_be_broadcast_are_errors_on_all_ranks(
    pools: Pools, shape: Shape
) -> None:
    expected = [
        "rank 1: parameter 'late' is not initialized yet: run one forward pass",
        "parameter 1 differs: rank 0 has a (2, 3) float32, rank 1 has b (2, 3) float32",
        "parameter 0 differs: rank 0 has w (2, 3) float32, rank 1 has w (2, 4) float32",
        "rank 0 has 1 parameters, rank 1 has 2",
        "rank 1: params=list must be a ParameterDict, a dict or list of Parameters, or",
        "rank 1: 'b' is of type float, not Parameter or NDArray",
        "rank 0, 1: 'a' is row_sparse; only dense arrays can be broadcast",
        "nothing",
    ]
    for texts in pools.get(shape).run(_bad_parameters):
        for text, part in zip(texts, expected):
            assert part in text
