"""What of a network moves, is averaged, or is carried."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd.center import AVERAGED, CARRIED, MOVED
from gluon_esgd.engine import view
from gluon_esgd.parameters import Weights, contract


def _weights(dtype: str = "float32", **settings: Any) -> tuple:
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Dense(4, in_units=3),
        gluon.nn.BatchNorm(in_channels=4),
        gluon.nn.Dense(2, in_units=4),
    )
    net.initialize()
    net.cast(dtype)
    params = list(net.collect_params().values())
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.1, **settings})
    return net, params, trainer, Weights(params, trainer._optimizer, trainer._updaters)


def test_kinds_follow_what_is_trained_now() -> None:
    net, params, _, weights = _weights()
    names = [params[i].name.split("_", 1)[1] for i in weights.order]
    assert names[-2:] == ["running_mean", "running_var"]
    assert weights.kinds().tolist() == [MOVED] * 6 + [AVERAGED] * 2
    assert weights.num_moved == weights.size - 8
    net[0].weight.grad_req = "null"
    net[0].bias.lr_mult = 0
    assert weights.kinds().tolist() == [CARRIED] * 2 + [MOVED] * 4 + [AVERAGED] * 2
    net[0].weight.grad_req = "write"
    net[0].bias.lr_mult = 1
    assert CARRIED not in weights.kinds()


def test_shifts_go_to_what_is_moved_only() -> None:
    net, params, _, weights = _weights()
    net[2].bias.lr_mult = 0
    before = view(weights.flat()).copy()
    weights.add(mx.nd.ones((weights.size,)), weights.kinds())
    moved = view(weights.flat()) - before
    frozen = sum(int(np.prod(p.shape)) for p in params if p.name == net[2].bias.name)
    np.testing.assert_allclose(moved[: weights.num_moved - frozen], 1, rtol=1e-6)
    assert not moved[weights.num_moved - frozen :].any()


def test_write_puts_the_center_in_and_restore_takes_it_out() -> None:
    net, _, _, weights = _weights()
    own, before = weights.own(), view(weights.flat()).copy()
    weights.write(mx.nd.ones((weights.size,)) * -2)
    assert net[1].running_var.data().asnumpy().tolist() == [0] * 4, "variances stay at least 0"
    assert net[1].running_mean.data().asnumpy().tolist() == [-2] * 4
    weights.restore(own)
    np.testing.assert_array_equal(view(weights.flat()), before)


def test_masters_are_read_moved_and_cast() -> None:
    param = gluon.Parameter("w", shape=(3,), dtype="float16", init="ones")
    param.initialize()
    trainer = gluon.Trainer([param], "sgd", {"learning_rate": 0.0, "multi_precision": True})
    for grad in param.list_grad():
        grad[:] = 0
    for data in param.list_data():
        data._fresh_grad = True
    trainer.step(1)
    weights = Weights([param], trainer._optimizer, trainer._updaters)
    weights.add(mx.nd.ones((3,)) * 2.0**-14, weights.kinds())  # too small for a half float beside 1
    np.testing.assert_array_equal(view(weights.flat()), np.float32(1 + 2.0**-14))
    assert (param.data().asnumpy() == 1).all()
    weights.set_to(mx.nd.ones((3,)) * 5)
    assert (param.data().asnumpy() == 5).all() and (view(weights.flat()) == 5).all()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_travel_as_float32(dtype: str) -> None:
    param = gluon.Parameter("w", shape=(3,), dtype=dtype, init="ones")
    param.initialize()
    trainer = gluon.Trainer([param], "sgd")
    weights = Weights([param], trainer._optimizer, trainer._updaters)
    weights.add(mx.nd.ones((3,)), weights.kinds())
    assert param.data().dtype == np.dtype(dtype) and (param.data().asnumpy() == 2).all()
    assert view(weights.flat()).dtype == np.float32


def test_contract_tells_networks_and_rules_apart() -> None:
    small, large = _weights()[1], _weights()[1][:3]
    order = list(range(len(small)))
    first = contract(small, order, "esgd")
    assert first == contract(_weights()[1], order, "esgd")
    assert first != contract(large, order[:3], "esgd")
    assert first != contract(small, order[::-1], "esgd")
    assert first != contract(small, order, "asgd")
    assert all(abs(v) < 2**24 for v in contract(small, order, "sgd").values())
