"""How a trainer is made, and several of them."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..registry import theme
from ..scripts import (
    BATCH,
    CLASSES,
    FEATURES,
    LOSS,
    MOMENTUM,
    PLAIN,
    backward,
    batches,
    mlp,
    together,
    train,
    weights,
)

behaviour = theme("Making a trainer")


@behaviour("from `net.collect_params()`")
def from_parameter_dict(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(net, trainer, share)
    return weights(net)


@behaviour("from a dict")
def from_dict(Trainer, share):
    net = mlp()
    params = {f"my_{i}": p for i, p in enumerate(net.collect_params().values())}
    train(net, Trainer(params, *MOMENTUM), share)
    return weights(net)


@behaviour("from a list")
def from_list(Trainer, share):
    net = mlp()
    train(net, Trainer(list(net.collect_params().values()), *MOMENTUM), share)
    return weights(net)


@behaviour("from some of a network's parameters")
def from_some(Trainer, share):
    net = mlp()
    train(net, Trainer(net.collect_params(".*weight"), *MOMENTUM), share)
    return weights(net)


@behaviour("wrong arguments raise what Gluon raises")
def wrong_arguments(Trainer, share):
    net = mlp()
    params, elsewhere = net.collect_params(), mlp(FEATURES, CLASSES, ctx=mx.cpu(1))
    for error, *args in [
        (ValueError, net, "sgd"),
        (ValueError, [1, 2], "sgd"),
        (AssertionError, params, mx.optimizer.SGD(), {"learning_rate": 0.1}),
        (ValueError, params, "no such optimizer"),
        (TypeError, params, "sgd", {"no_such_setting": 1}),
        (AssertionError, together(net, elsewhere), "sgd"),
        (RuntimeError, gluon.nn.Dense(3, in_units=2).collect_params(), "sgd"),
    ]:
        try:
            Trainer(*args)
        except Exception as raised:
            assert type(raised) is error, raised
        else:
            raise AssertionError(f"{args} raised nothing")
    train(net, Trainer(params, *MOMENTUM), share)
    return weights(net)


@behaviour("deferred initialization: before the first forward pass")
def before_the_first_forward(Trainer, share):
    net = mlp(deferred=True)
    train(net, Trainer(net.collect_params(), *MOMENTUM), share)
    return weights(net)


@behaviour("deferred initialization: after the first forward pass")
def after_the_first_forward(Trainer, share):
    net = mlp(deferred=True)
    net(batches()[0][0])
    train(net, Trainer(net.collect_params(), *MOMENTUM), share)
    return weights(net)


@behaviour("between backward and step")
def between_backward_and_step(Trainer, share):
    net = mlp()
    trainer = None
    for x, y in batches():
        samples = backward(net, share(x), share(y))
        if trainer is None:
            trainer = Trainer(net.collect_params(), *MOMENTUM)
        trainer.step(samples)
    return weights(net)


@behaviour("between forward and backward")
def between_forward_and_backward(Trainer, share):
    net = mlp()
    x, y = map(share, batches()[0])
    with autograd.record():
        loss = LOSS(net(x), y)
    trainer = Trainer(net.collect_params(), *PLAIN)
    loss.backward()
    trainer.step(len(x))
    train(net, trainer, share)
    return weights(net)


@behaviour("detached: made and not used")
def not_used(Trainer, share):
    net = mlp()
    Trainer(net.collect_params(), *MOMENTUM)
    train(net, Trainer(net.collect_params(), *MOMENTUM), share)
    return weights(net)


@behaviour("a new trainer for a network in mid-run")
def a_new_trainer(Trainer, share):
    net = mlp()
    train(net, Trainer(net.collect_params(), *MOMENTUM), share)
    train(net, Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}), share)
    return weights(net)


@behaviour("two networks and optimizers, in turn (GAN)")
def gan(Trainer, share):
    generator, critic = mlp(5, 10, FEATURES), mlp(FEATURES, 12, 1)
    loss_of = gluon.loss.SigmoidBCELoss()
    trainers = [
        Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
        for net in (generator, critic)
    ]
    random = np.random.RandomState(1)
    for _ in range(4):
        noise, real = (share(mx.nd.array(random.randn(BATCH, n))) for n in (5, FEATURES))
        ones, zeros = mx.nd.ones(len(real)), mx.nd.zeros(len(real))
        with autograd.record():
            fake = generator(noise)
            loss = loss_of(critic(real), ones) + loss_of(critic(fake.detach()), zeros)
        loss.backward()
        trainers[1].step(len(real))
        with autograd.record():
            loss = loss_of(critic(generator(noise)), ones)
        loss.backward()
        trainers[0].step(len(real))
    return weights(generator, critic)


@behaviour("two networks trained by one backward pass")
def two_trainers_in_a_step(Trainer, share):
    body, head = mlp(FEATURES, 8), mlp(8, CLASSES)
    trainers = [
        Trainer(body.collect_params(), *MOMENTUM),
        Trainer(head.collect_params(), "adam", {"learning_rate": 0.01}),
    ]
    for x, y in batches():
        samples = backward(lambda x: head(body(x)), share(x), share(y))
        for trainer in trainers:
            trainer.step(samples)
    return weights(body, head)


@behaviour("two trainers with parameters in common, in turn")
def overlapping(Trainer, share):
    net = mlp()
    trainers = [
        Trainer(net.collect_params(), *MOMENTUM),
        Trainer(net[1].collect_params(), "adam", {"learning_rate": 0.01}),
    ]
    for i, (x, y) in enumerate(batches(6)):
        trainers[i % 2].step(backward(net, share(x), share(y)))
    return weights(net)


@behaviour("parameters shared by two blocks")
def shared_parameters(Trainer, share):
    first = mlp()
    second = gluon.nn.HybridSequential()
    second.add(
        gluon.nn.Dense(8, activation="tanh", in_units=FEATURES, params=first[0].params),
        gluon.nn.Dense(CLASSES, in_units=8),
    )
    mx.random.seed(7)
    second[1].initialize(mx.init.Xavier())
    trainer = Trainer(together(first, second), *MOMENTUM)
    train(lambda x: first(x) + second(x), trainer, share)
    return weights(first, second)
