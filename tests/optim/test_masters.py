"""Exchanges find and move the fp32 masters of half-precision weights, whoever made them."""

from __future__ import annotations

from typing import Any, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd.engine import view
from gluon_esgd.optim import Masters
from gluon_esgd.parameters import Weights

from ..training.optimizers import SAMPLES, SETTINGS, backward, make, parameters, weights

ONE, TWO = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]


class OwnWay(mx.optimizer.Optimizer):
    """Keeps its state in its own order, and masters with it."""

    def create_state_multi_precision(self, index: int, weight: Any) -> Any:
        master = weight.astype("float32")
        return {"counts": [1, 2], "inner": [self.create_state(index, master), master]}

    def create_state(self, index: int, weight: Any) -> Any:
        return mx.nd.zeros(weight.shape, ctx=weight.context)

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        self._update_count(index)
        momentum, master = state["inner"]
        momentum[:] = 0.5 * momentum + grad.astype("float32") * self.rescale_grad
        master[:] -= self._get_lr(index) * momentum
        mx.nd.cast(master, dtype="float16", out=weight)


class MasterAlone(OwnWay):
    """The state is the master."""

    def create_state_multi_precision(self, index: int, weight: Any) -> Any:
        return weight.astype("float32")

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        state -= self._get_lr(index) * self.rescale_grad * grad.astype("float32")
        mx.nd.cast(state, dtype="float16", out=weight)


class Hidden(OwnWay):
    """Keeps masters where nobody finds them."""

    def create_state_multi_precision(self, index: int, weight: Any) -> Any:
        self.states = {index: super().create_state_multi_precision(index, weight)}
        return None

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        super().update_multi_precision(index, weight, grad, self.states[index])


def _trainer(optimizer: Any, params: List[gluon.Parameter]) -> Tuple[gluon.Trainer, Weights]:
    trainer = gluon.Trainer(params, optimizer, kvstore=None)
    return trainer, Weights(params, optimizer, trainer._updaters)


def _check_that_the_next_update_keeps_a_shift(optimizer: Any, contexts: list) -> None:
    params = parameters("float16", contexts)
    trainer, moved = _trainer(optimizer, params)
    shift = mx.nd.ones((moved.size,)) * 8
    for step in range(3):
        moved.add(shift, moved.kinds())  # before the first update there are no masters
        before = [weights(params, k) for k in range(len(contexts))]
        np.testing.assert_array_equal(before[0], view(moved.flat()).astype("float16"))
        backward(params, step, 0, SAMPLES)
        trainer.step(SAMPLES)
        for device, own in enumerate(before):
            np.testing.assert_allclose(weights(params, device), own, atol=4)


FORMS = [f for f in SETTINGS if f not in ("ftrl", "ftml")]  # exchanges are refused for these
CASES = [(f, ONE) for f in FORMS] + [(f, TWO) for f in FORMS if f != "lbsgd:cumulative"]


@pytest.mark.parametrize(("form", "contexts"), CASES)
def test_masters_of_every_optimizer(form: str, contexts: list) -> None:
    settings = {"learning_rate": 0.01} if "learning_rate" in SETTINGS[form] else {}
    _check_that_the_next_update_keeps_a_shift(
        make(form, multi_precision=True, **settings), contexts
    )


@pytest.mark.parametrize("contexts", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("kind", [OwnWay, MasterAlone])
def test_masters_of_a_subclass_with_its_own_way(kind: type, contexts: list) -> None:
    optimizer = kind(learning_rate=0.01, multi_precision=True)
    _check_that_the_next_update_keeps_a_shift(optimizer, contexts)


def _zeros(names: List[str]) -> List[gluon.Parameter]:
    params = [gluon.Parameter(n, shape=(3,), dtype="float16") for n in names]
    for param in params:
        param.initialize(mx.init.One() if "one" in param.name else mx.init.Zero())
    return params


def _step_without_gradients(trainer: gluon.Trainer) -> None:
    for param in trainer._params:
        for data in param.list_data():
            data._fresh_grad = True
    trainer.step(1)


def test_masters_and_momenta_of_zeros_are_told_apart_by_other_parameters() -> None:
    params = _zeros(["zeros", "ones"])
    optimizer = OwnWay(learning_rate=0.1, multi_precision=True)
    trainer, _ = _trainer(optimizer, params)
    _step_without_gradients(trainer)
    masters = Masters(params, optimizer, trainer._updaters)
    for index in (0, 1):
        expected = trainer._updaters[0].states[index]["inner"][1]
        assert masters.targets(index)[0] is expected
    trainer._updaters[0].states[0]["inner"][1][:] = 5  # it is not looked for again
    assert (masters.targets(0)[0].asnumpy() == 5).all()


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        (OwnWay, ["zeros"], "optimizer 'OwnWay', parameter 'zeros': .* but 2 float32 arrays"),
        (Hidden, ["ones"], "optimizer 'Hidden', parameter 'ones': .* but no float32 arrays"),
    ],
)
def test_what_cannot_be_told_apart_is_an_error(kind: type, names: list, message: str) -> None:
    trainer, moved = _trainer(kind(learning_rate=0.1, multi_precision=True), _zeros(names))
    before = moved.flat()  # no state yet: the weights
    _step_without_gradients(trainer)
    with pytest.raises(ValueError, match=message):
        moved.copy_to(before)


def test_no_master_without_multi_precision() -> None:
    params = _zeros(["ones"])
    optimizer = OwnWay(learning_rate=0.1)
    assert Masters(params, optimizer, []).targets(0)[0] is params[0].data()


def test_weights_that_a_script_has_set_become_masters() -> None:
    params = parameters("float16")
    trainer, moved = _trainer(make("sgd", multi_precision=True), params)
    backward(params, 0, 0, SAMPLES)
    trainer.step(SAMPLES)
    exact = view(moved.flat()).copy()
    moved.follow_parameters()
    np.testing.assert_array_equal(view(moved.flat()), exact)  # what is the same stays exact
    params[1].set_data(mx.nd.ones(params[1].shape, dtype="float16") * 3)
    moved.follow_parameters()
    size = params[0].data().size
    np.testing.assert_array_equal(view(moved.flat())[:size], exact[:size])
    assert (view(moved.flat())[size:] == 3).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_copy_of_dcasgd_moves_with_the_weight(dtype: str) -> None:
    params = parameters(dtype)
    trainer, moved = _trainer(make("dcasgd", multi_precision=True), params)
    moved.add(mx.nd.ones((moved.size,)), moved.kinds())  # no state yet
    for step in range(2):
        backward(params, step, 0, SAMPLES)
        trainer.step(SAMPLES)

    def own_movement() -> np.ndarray:
        states = trainer._updaters[0].states
        copies = [states[i] if dtype == "float32" else states[i][1] for i in range(2)]
        return view(moved.flat()) - np.concatenate([c[1].asnumpy().ravel() for c in copies])

    before = own_movement()
    moved.add(mx.nd.ones((moved.size,)) * 4, moved.kinds())
    np.testing.assert_allclose(own_movement(), before, atol=1e-5)
    moved.set_to(mx.nd.ones((moved.size,)))
    assert not own_movement().any()
