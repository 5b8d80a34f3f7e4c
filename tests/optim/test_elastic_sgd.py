"""`ElasticSGD` is MXNet's SGD and NAG to the bit."""

from __future__ import annotations

from typing import Any, Dict, List

import mxnet as mx
import numpy as np
import pytest

from gluon_esgd import ElasticSGD

SETTINGS: List[Dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "wd": 1e-3, "clip_gradient": 0.5},
    {"momentum": 0.9, "multi_precision": True},
    {"multi_precision": True, "wd": 0.1},
]


def _train(optimizer: mx.optimizer.Optimizer, dtype: str, steps: int = 20) -> np.ndarray:
    random = np.random.RandomState(0)
    weights = [mx.nd.array(random.randn(*s), dtype=dtype) for s in ((5, 3), (7,), (2, 2), (4,))]
    optimizer.lr_mult = {1: 0.1}
    optimizer.wd_mult = {2: 0.0}
    updater = mx.optimizer.get_updater(optimizer)
    for _ in range(steps):
        grads = [mx.nd.array(random.randn(*w.shape), dtype=dtype) for w in weights]
        updater(list(range(len(weights))), grads, weights)
    return np.concatenate([w.asnumpy().ravel() for w in weights])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_same_bits_as_mxnet(settings: Dict[str, Any], dtype: str, nesterov: bool) -> None:
    if dtype == "float16" and not settings.get("multi_precision"):
        dtype = "float64" if nesterov else "float32"
    peer = mx.optimizer.NAG if nesterov else mx.optimizer.SGD
    ours = ElasticSGD(learning_rate=0.1, nesterov=nesterov, **settings)
    np.testing.assert_array_equal(
        _train(ours, dtype), _train(peer(learning_rate=0.1, **settings), dtype)
    )


def test_registered_by_name_and_carries_its_settings() -> None:
    made = mx.optimizer.create("elasticsgd", learning_rate=0.5, interval=8, beta=0.5, momentum=0.9)
    assert isinstance(made, ElasticSGD)
    assert (made.interval, made.alpha, made.beta, made.momentum) == (8, None, 0.5, 0.9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.1, "beta": 0.9}, "alpha=0.1 or beta=0.9, not both"),
        ({"interval": 0}, "interval=0 must be an integer of at least 1"),
        ({"interval": 1.5}, "interval=1.5"),
    ],
)
def test_bad_settings(settings: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticSGD(**settings)
