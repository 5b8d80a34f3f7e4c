"""Parameters that a script changes while a trainer has them."""

from __future__ import annotations

import os
import tempfile

import mxnet as mx

from ..registry import theme
from ..scripts import LOSS, MOMENTUM, PLAIN, backward, batches, mlp, train, weights

behaviour = theme("Parameters changed under a trainer")


@behaviour("`set_data` before the first step")
def set_before(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    net[0].weight.set_data(mx.nd.ones(net[0].weight.shape) * 0.25)
    train(net, trainer, share)
    return weights(net)


@behaviour("`set_data` in mid-run")
def set_in_mid_run(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(net, trainer, share)
    net[0].weight.set_data(mx.nd.ones(net[0].weight.shape) * 0.25)
    train(net, trainer, share)
    return weights(net)


@behaviour("`set_data` before deferred initialization")
def set_deferred(Trainer, share):
    net = mlp(deferred=True)
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    net[0].weight.set_data(mx.nd.ones((8, 6)) * 0.25)
    train(net, trainer, share)
    return weights(net)


def _loaded(Trainer, share, before, after):
    net = mlp()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "net.params")
        mlp(seed=11).save_parameters(path)
        trainer = Trainer(net.collect_params(), *MOMENTUM)
        train(net, trainer, share, before)
        net.load_parameters(path)
    train(net, trainer, share, after)
    return weights(net)


@behaviour("`load_parameters` before the first step")
def loaded_before(Trainer, share):
    return _loaded(Trainer, share, 0, 4)


@behaviour("`load_parameters` in mid-run")
def loaded_in_mid_run(Trainer, share):
    return _loaded(Trainer, share, 3, 3)


@behaviour("`save_parameters` in mid-run")
def saved_in_mid_run(Trainer, share):
    net, copy = mlp(), mlp(seed=11)
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(net, trainer, share)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "net.params")
        net.save_parameters(path)
        train(net, trainer, share)
        copy.load_parameters(path)
    return weights(net, copy)


@behaviour("`initialize(force_reinit=True)`")
def initialized_again(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(net, trainer, share)
    mx.random.seed(9)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    train(net, trainer, share)
    return weights(net)


@behaviour("`reset_ctx` to another device and back")
def other_device(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *PLAIN)
    for ctx in (mx.cpu(0), mx.cpu(1), mx.cpu(0)):
        net.collect_params().reset_ctx(ctx)
        for x, y in batches(2):
            x, y = (share(part).as_in_context(ctx) for part in (x, y))
            trainer.step(backward(net, x, y))
    return weights(net)


@behaviour("`cast` before the first step")
def cast_before(Trainer, share):
    net = mlp()
    net.cast("float64")
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(lambda x: net(x.astype("float64")), trainer, share)
    return weights(net)


@behaviour("`cast` in mid-run and back")
def cast_in_mid_run(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *PLAIN)
    for dtype in ("float32", "float64", "float32"):
        net.cast(dtype)
        train(lambda x, dtype=dtype: net(x.astype(dtype)).astype("float32"), trainer, share, 2)
    return weights(net)


@behaviour("weights changed in place (`p.data()[:] = ...`)")
def changed_in_place(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(net, trainer, share)
    for param in net.collect_params().values():
        param.data()[:] *= 0.5
    train(net, trainer, share)
    return weights(net)


@behaviour("training by hand between steps")
def by_hand_between(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(net, trainer, share)
    x, y = batches(1)[0]
    with mx.autograd.record():
        loss = LOSS(net(x), y)
    loss.backward()
    for param in net.collect_params().values():
        param.set_data(param.data() - 0.01 * param.grad())
    train(net, trainer, share)
    return weights(net)
