"""Devices of a process stay alike whatever the optimizer keeps in itself."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

from gluon_esgd.optim import keep_alike

from ..training.optimizers import make


class Counting(mx.optimizer.Optimizer):
    """Counts its updates in itself, as optimizers of scripts do."""

    updates = 0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen = None

    def update(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        self.updates += 1
        weight -= self.updates * (2 if self.seen is None else 1) * grad
        self.seen = self.updates


def _train(optimizer: mx.optimizer.Optimizer, devices: int) -> np.ndarray:
    weights = [[mx.nd.ones((2,), ctx=mx.cpu(k)) * (1 + i) for i in (0, 1)] for k in range(devices)]
    updaters = [mx.optimizer.get_updater(optimizer) for _ in range(devices)]
    keep_alike(updaters)
    for _ in range(7):
        for k, updater in enumerate(updaters):
            updater([0, 1], [w / 10 for w in weights[k]], weights[k])
    return np.stack([np.concatenate([w.asnumpy() for w in own]) for own in weights])


@pytest.mark.parametrize("name", ["nadam", "lars", "sgd", "counting"])
def test_devices_stay_alike_and_are_as_one(name: str) -> None:
    def optimizer() -> mx.optimizer.Optimizer:
        return Counting() if name == "counting" else make(name)

    alone, several = optimizer(), optimizer()
    (expected,) = _train(alone, 1)
    for own in _train(several, 3):
        np.testing.assert_array_equal(own, expected)
    assert several.num_update == alone.num_update
    assert getattr(several, "m_schedule", None) == getattr(alone, "m_schedule", None)
