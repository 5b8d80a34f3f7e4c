"""Small problems that every rank can make by itself, and what ranks do with them."""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import gluon_esgd.optim  # noqa: F401 (registers 'elasticsgd')

STEPS, BATCH, FEATURES, CLASSES = 20, 24, 6, 3


def network(
    seed: int = 0, deferred: bool = False, ctx: Any = None, hidden: int = 16
) -> gluon.nn.HybridSequential:
    """A small classifier whose initial weights depend on `seed` alone."""
    mx.random.seed(seed)
    np.random.seed(seed)
    net = gluon.nn.HybridSequential()
    with net.name_scope():  # else names are dense9, dense10, and Gluon sorts by them
        net.add(
            gluon.nn.Dense(hidden, activation="tanh", in_units=0 if deferred else FEATURES),
            gluon.nn.Dense(CLASSES, in_units=0 if deferred else hidden),
        )
    net.initialize(mx.init.Xavier(), ctx=ctx)
    return net


def batches(steps: int = STEPS, batch: int = BATCH) -> Tuple[np.ndarray, np.ndarray]:
    """Random batches with labels that depend on the data."""
    random = np.random.RandomState(3)
    x = random.randn(steps, batch, FEATURES).astype(np.float32)
    y = (x @ random.randn(FEATURES, CLASSES)).argmax(-1)
    return x, y


def shares(batch: int, sizes: Sequence[int]) -> List[slice]:
    """Cut a batch into consecutive slices of these relative sizes."""
    ends = np.cumsum(sizes) * batch // sum(sizes)
    return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends)]


def train_step(net: Any, trainer: Any, x: np.ndarray, y: np.ndarray, **step: Any) -> None:
    """Forward, backward, step on one batch in fp32."""
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    with autograd.record():
        loss = loss_of(net(mx.nd.array(x)), mx.nd.array(y))
    loss.backward()
    trainer.step(len(x), **step)


def flat(net: Any) -> np.ndarray:
    """All weights of `net`, in order."""
    return np.concatenate([p.data().asnumpy().ravel() for p in net.collect_params().values()])


def digest(net: Any) -> str:
    return hashlib.sha256(flat(net).tobytes()).hexdigest()


def train_alone(optimizer: str, settings: Dict[str, Any], steps: int = STEPS) -> np.ndarray:
    """What one process and plain Gluon make of the whole batches."""
    net = network()
    trainer = gluon.Trainer(net.collect_params(), optimizer, dict(settings))
    for x, y in zip(*batches(steps)):
        train_step(net, trainer, x, y)
    return flat(net)


def train_shared(
    optimizer: str,
    settings: Dict[str, Any],
    sizes: Optional[Sequence[int]] = None,
    steps: int = STEPS,
    **trainer_settings: Any,
) -> Tuple[np.ndarray, List[str]]:
    """The same on every worker with its share; weights and a digest after every step."""
    from gluon_esgd import ElasticTrainer, world

    net = network(seed=world().rank)  # other ranks take the leader's weights
    trainer = ElasticTrainer(net.collect_params(), optimizer, dict(settings), **trainer_settings)
    mine = shares(BATCH, sizes or [1] * world().num_workers)[world().worker_rank]
    digests = []
    for x, y in zip(*batches(steps)):
        train_step(net, trainer, x[mine], y[mine])
        digests.append(digest(net))
    weights = flat(net)
    trainer.finish()
    return weights, digests


def solve_regression(rule: str, steps: int, lr: float, **settings: Any) -> Tuple[np.ndarray, ...]:
    """Linear regression with one minimum for all: own weights, center, and the minimum."""
    from gluon_esgd import ElasticTrainer, world

    truth = np.random.RandomState(1).randn(FEATURES).astype(np.float32)
    random = np.random.RandomState(100 + world().worker_rank)
    net = gluon.nn.Dense(1, in_units=FEATURES, use_bias=False)
    net.initialize(mx.init.Normal(1.0))
    trainer = ElasticTrainer(
        net.collect_params(), "sgd", {"learning_rate": lr}, rule=rule, **settings
    )
    for _ in range(2):
        for _ in range(steps):
            x = mx.nd.array(random.randn(16, FEATURES))
            y = mx.nd.dot(x, mx.nd.array(truth)).reshape((-1, 1))
            with autograd.record():
                loss = ((net(x) - y) ** 2) / 2
            loss.backward()
            trainer.step(16)
        # Clients that ran ahead were held back by those behind: once more when all are here.
        with trainer.center(sync=True):
            pass
    trainer.finish()
    own = flat(net)
    with trainer.center(sync=True):
        center = flat(net)
    assert (flat(net) == own).all()
    return own, center, truth


def assert_at_the_minimum(results: Sequence[Tuple[np.ndarray, ...]]) -> None:
    """Of `solve_regression`, by worker: one center, near the minimum, and all clients near it."""
    centers = [center for _, center, _ in results]
    for own, center, truth in results:
        np.testing.assert_array_equal(center, centers[0])
        np.testing.assert_allclose(own, center, atol=1e-3)
        np.testing.assert_allclose(center, truth, atol=1e-3)


def make_trainer(net: Any, **kwargs: Any) -> Any:
    from gluon_esgd import ElasticTrainer

    settings = {"learning_rate": 0.1, "momentum": 0.9}
    return ElasticTrainer(net.collect_params(), "sgd", settings, **kwargs)


def own_share(x: np.ndarray) -> np.ndarray:
    from gluon_esgd import world

    return x[shares(len(x), [1] * world().size)[world().rank]]
