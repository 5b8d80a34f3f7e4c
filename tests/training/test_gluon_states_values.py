"""All that an optimizer may hold comes back from a states file."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer
from gluon_esgd.states import apply, check, collect, decode, encode

LEFT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Gluon's


class OwnOptimizer(mx.optimizer.SGD):
    """As a script may define it, with attributes of all kinds."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.table = {"a": [1, (2.5, None)], 3: True}
        self.half = np.float16(0.1)
        self.vector = np.arange(6, dtype=np.int64).reshape(2, 3).T
        self.marks = mx.np.array([1.0, 2.0])
        self.endless = float("inf")
        self.helper = logging.getLogger("x")  # nothing that can be said


def _own(value: float) -> OwnOptimizer:
    optimizer = OwnOptimizer(learning_rate=value, momentum=0.9)
    optimizer.table["a"][0] = value
    optimizer.half = np.float16(value)
    optimizer.vector = optimizer.vector * int(10 * value)
    optimizer.marks = optimizer.marks * value
    optimizer.endless = value
    return optimizer


@pytest.mark.parametrize("protocol", [*range(pickle.HIGHEST_PROTOCOL + 1), None])
def test_attributes_come_back_whatever_wrote_them(protocol: Any, tmp_path: Path) -> None:
    updater = mx.optimizer.get_updater(_own(0.5))
    updater.optimizer.endless = float("inf")
    updater(0, mx.nd.ones((2,)), mx.nd.ones((2,)))
    if protocol is None:
        data = encode(collect(updater.optimizer, updater))
    else:
        data = pickle.dumps((updater.states, updater.optimizer), protocol)
    states = decode(data, "f")
    assert states.optimizer == "OwnOptimizer"
    optimizer = _own(0.25)
    helper = optimizer.helper = logging.getLogger("own")
    other = mx.optimizer.get_updater(optimizer)
    param = gluon.Parameter("p", shape=(2,))
    param.initialize()
    check(states, optimizer, [param], "f")
    said = apply(states, optimizer, [other], [param])
    assert optimizer.table == {"a": [0.5, (2.5, None)], 3: True}
    assert optimizer.half == np.float16(0.5) and type(optimizer.half) is np.float16
    np.testing.assert_array_equal(optimizer.vector, 5 * np.arange(6).reshape(2, 3).T)
    assert optimizer.vector.dtype == np.int64 and optimizer.endless == float("inf")
    assert type(optimizer.marks) is mx.np.ndarray
    np.testing.assert_array_equal(optimizer.marks.asnumpy(), [0.5, 1.0])
    assert (optimizer.lr, optimizer.num_update) == (0.5, 1)
    np.testing.assert_array_equal(other.states[0].asnumpy(), updater.states[0].asnumpy())
    assert optimizer.helper is helper
    assert said == [
        "attributes of the optimizer that a states file does not hold stay as they are: helper"
    ]


def test_arrays_of_any_type_and_shape_survive() -> None:
    state = [
        None,
        (mx.nd.array([1, 2], dtype="float16"), mx.nd.ones((1, 2, 3), dtype="float64")),
        [mx.nd.array([1, 2], dtype="int32"), mx.np.ones((2,), dtype="uint8"), 3, "text", 2.5],
        {"a": mx.nd.array([7], dtype="int64"), 4: np.float64(0.1)},
        np.zeros((0, 3), np.float32),
    ]
    updater = mx.optimizer.get_updater(mx.optimizer.SGD())
    updater.states = {0: state}
    own = decode(encode(collect(updater.optimizer, updater)), "f")
    gluons = decode(updater.get_states(), "f")
    param = gluon.Parameter("p", shape=(2,))
    param.initialize()
    for states in (own, gluons):
        other = mx.optimizer.get_updater(mx.optimizer.SGD())
        apply(states, other.optimizer, [other], [param])
        assert _described(other.states[0]) == _described(state)


def _described(value: Any) -> Any:
    if isinstance(value, (mx.nd.NDArray, np.ndarray)):
        host = value.asnumpy() if isinstance(value, mx.nd.NDArray) else value
        return (type(value).__name__, str(host.dtype), host.shape, host.tobytes())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [_described(item) for item in value])
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    return (type(value).__name__, value)


@LEFT_OPEN
def test_row_sparse_weights_and_their_momentum(tmp_path: Path) -> None:
    def make_one(kind: type) -> Tuple[Any, Any]:
        param = gluon.Parameter("w", shape=(6, 2), stype="row_sparse", grad_stype="row_sparse")
        param.initialize(mx.init.One())
        return param, kind([param], "sgd", {"learning_rate": 0.1, "momentum": 0.9})

    def run(param: Any, trainer: Any) -> np.ndarray:
        rows = mx.nd.array([0, 2, 3])
        for _ in range(2):
            with mx.autograd.record():
                loss = mx.nd.sparse.dot(
                    mx.nd.array([[1, 0, 2, 3, 0, 0]]).tostype("csr"), param.row_sparse_data(rows)
                ).sum()
            loss.backward()
            trainer.step(1)
        return param.row_sparse_data(mx.nd.arange(6)).asnumpy()

    fname, results = str(tmp_path / "s"), []
    param, trainer = make_one(gluon.Trainer)
    run(param, trainer)
    trainer.save_states(fname)
    for kind in (gluon.Trainer, ElasticTrainer):
        other, again = make_one(kind)
        again.load_states(fname)
        results.append(run(other, again))
    np.testing.assert_array_equal(results[0], results[1])
    own = mx.optimizer.get_updater(trainer._kvstore._updater.optimizer)
    own.states = trainer._kvstore._updater.states
    message = "optimizer 'SGD' keeps a RowSparseNDArray in its state of parameter 0, which a"
    with pytest.raises(ValueError, match=message):
        collect(own.optimizer, own)
