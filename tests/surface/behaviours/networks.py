"""What kinds of networks a trainer trains."""

from __future__ import annotations

import os
import tempfile
import warnings

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, npx

from ..registry import theme
from ..scripts import BATCH, CLASSES, FEATURES, LOSS, MOMENTUM, batches, mlp, train, weights

behaviour = theme("Networks")


def _hybrid(Trainer, share, **how):
    net = mlp()
    net.hybridize(**how)
    train(net, Trainer(net.collect_params(), *MOMENTUM), share, 6)
    return weights(net)


@behaviour("`hybridize()`")
def hybridized(Trainer, share):
    return _hybrid(Trainer, share)


@behaviour("`hybridize(static_alloc=True)`")
def static_alloc(Trainer, share):
    return _hybrid(Trainer, share, static_alloc=True)


@behaviour("`hybridize(static_alloc=True, static_shape=True)`")
def static_shape(Trainer, share):
    return _hybrid(Trainer, share, static_alloc=True, static_shape=True)


@behaviour("hybridized in mid-run")
def hybridized_in_mid_run(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(net, trainer, share)
    net.hybridize(static_alloc=True, static_shape=True)
    train(net, trainer, share)
    net.hybridize(False)
    train(net, trainer, share)
    return weights(net)


@behaviour("convolutions and BatchNorm")
def normalized(Trainer, share):
    net = gluon.nn.HybridSequential()
    with net.name_scope():
        net.add(
            gluon.nn.Conv2D(5, 3, in_channels=2),
            gluon.nn.BatchNorm(in_channels=5),
            gluon.nn.Activation("relu"),
            gluon.nn.Dense(CLASSES, in_units=5 * 16),
        )
    mx.random.seed(5)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True)
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for x, y in batches(4, (2, 6, 6), BATCH // 2):
        # Both halves of a batch are alike, so that normalizing one is normalizing the whole.
        x, y = (share(mx.nd.concat(part, part, dim=0)) for part in (x, y))
        with autograd.record():
            loss = LOSS(net(x), y)
        loss.backward()
        trainer.step(len(x))
    return weights(net)


class _Words(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.embedding = gluon.nn.Embedding(11, 6)
            self.cells = gluon.rnn.LSTM(7, 2, layout="NTC", input_size=6)
            self.dense = gluon.nn.Dense(11, flatten=False, in_units=7)

    def hybrid_forward(self, F, x):
        return self.dense(self.cells(self.embedding(x)))


@behaviour("Embedding and LSTM, sequences of changing length")
def words(Trainer, share):
    net = _Words()
    mx.random.seed(5)
    net.initialize(mx.init.Xavier())
    trainer = Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    random = np.random.RandomState(2)
    for length in (4, 9, 4):
        x, y = (share(mx.nd.array(random.randint(0, 11, (BATCH, length)))) for _ in range(2))
        with autograd.record():
            loss = LOSS(net(x), y)
        loss.backward()
        trainer.step(len(x))
    return weights(net)


@behaviour("a `SymbolBlock` from files")
def imported(Trainer, share):
    exported = mlp()
    exported.hybridize()
    exported(mx.nd.zeros((1, FEATURES)))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = os.path.join(folder, "net")
        exported.export(path)
        net = gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")
    train(net, Trainer(net.collect_params(), *MOMENTUM), share)
    return weights(net)


class _Plain(gluon.Block):
    """Not hybrid, with a parameter of its own, and layers chosen by the data."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.scale = self.params.get("scale", shape=(1,), init="ones")
            self.layers = [mlp(FEATURES, CLASSES, seed=seed) for seed in (1, 2)]
            for layer in self.layers:
                self.register_child(layer)

    def forward(self, x):
        out = self.layers[0](x)
        for _ in range(int(abs(x[0, 0].asscalar()) * 0) + 2):
            out = out + self.layers[1](x) * self.scale.data()
        return out


@behaviour("a `Block` with Python control flow")
def plain_block(Trainer, share):
    net = _Plain()
    net.scale.initialize()
    train(net, Trainer(net.collect_params(), *MOMENTUM), share)
    return weights(net)


@behaviour("one network used twice in a loss (siamese)")
def siamese(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(lambda x: net(x) + net(x * 0.5), trainer, share)
    return weights(net)


@behaviour("np arrays (`npx.set_np()`)")
def np_arrays(Trainer, share):
    npx.set_np()
    try:
        net = mlp()
        trainer = Trainer(net.collect_params(), *MOMENTUM)
        for x, y in batches():
            x, y = (share(part.as_np_ndarray()) for part in (x, y))
            with autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()
            trainer.step(len(x))
        return weights(net)
    finally:
        npx.reset_np()
