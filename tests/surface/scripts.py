"""What the scripts have in common: small networks, batches, a step."""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

BATCH, FEATURES, CLASSES = 12, 6, 4
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
PLAIN = ("sgd", {"learning_rate": 0.1})

Batch = Tuple[mx.nd.NDArray, mx.nd.NDArray]


def mlp(*units: int, seed: int = 5, ctx: Any = None, deferred: bool = False) -> Any:
    """A network of these widths (features, hidden, classes unless given), initialized by `seed`."""
    units = units or (FEATURES, 8, CLASSES)
    net = gluon.nn.HybridSequential()
    with net.name_scope():
        for inputs, outputs in zip(units, units[1:]):
            net.add(gluon.nn.Dense(outputs, activation="tanh", in_units=0 if deferred else inputs))
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(magnitude=4), ctx=ctx)
    return net


def batches(count: int = 4, shape: Tuple[int, ...] = (FEATURES,), size: int = BATCH) -> List[Batch]:
    """The same random batches everywhere."""
    random = np.random.RandomState(3)
    return [
        (mx.nd.array(random.randn(size, *shape)), mx.nd.array(random.randint(0, CLASSES, size)))
        for _ in range(count)
    ]


def backward(net: Callable, x: mx.nd.NDArray, y: mx.nd.NDArray) -> int:
    """Forward and backward on what a rank has of a batch; return how many samples these are."""
    with autograd.record():
        loss = LOSS(net(x), y)
    loss.backward()
    return len(x)


def train(net: Callable, trainer: Any, share: Callable, count: int = 4, **step: Any) -> None:
    """Take `count` steps."""
    for x, y in batches(count):
        trainer.step(backward(net, share(x), share(y)), **step)


def weights(*nets: Any, ctx: Any = None) -> np.ndarray:
    """All parameters of `nets`, in order."""
    params = [p for net in nets for p in net.collect_params().values()]
    return np.concatenate([p.data(ctx).asnumpy().astype("float64").ravel() for p in params])


def gradients(net: Any) -> np.ndarray:
    """All gradients of `net`, in order."""
    return np.concatenate([p.grad().asnumpy().ravel() for p in net.collect_params().values()])


def together(*nets: Any) -> Any:
    """One ParameterDict of several networks."""
    params = nets[0].collect_params()
    for net in nets[1:]:
        params.update(net.collect_params())
    return params
