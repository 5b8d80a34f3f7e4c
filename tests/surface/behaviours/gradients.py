"""Gradients: what a script reads, keeps, adds up and computes itself."""

from __future__ import annotations

import mxnet as mx
from mxnet import autograd, gluon

from ..registry import MPI, SUMMED, Different, theme
from ..scripts import (
    BATCH,
    CLASSES,
    FEATURES,
    LOSS,
    MOMENTUM,
    PLAIN,
    backward,
    batches,
    gradients,
    mlp,
    train,
    weights,
)

behaviour = theme("Gradients")


@behaviour(
    "`p.grad()` read after `step()`",
    Different(
        SUMMED,
        lambda sums: sums / BATCH,
        "Gradients that were summed over ranks are divided by all samples already: "
        "`p.grad()` is the mean gradient, not the sum.",
    ),
)
def gradient_after_step(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *PLAIN)
    train(net, trainer, share, 2)
    return gradients(net)


@behaviour(
    "`p.grad()` read after `allreduce_grads()`",
    Different(
        MPI,
        lambda sums: sums / 2,
        "Gradients are the mean over the ranks, so that `update(batch_size)` takes the samples of "
        "one rank.",
    ),
)
def gradient_after_allreduce(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *PLAIN)
    samples = backward(net, *map(share, batches()[0]))
    trainer.allreduce_grads()
    seen = gradients(net)
    trainer.update(samples)
    return seen


@behaviour("gradient arrays that a script holds")
def held_gradients(Trainer, share):
    net = mlp()
    held = [p.grad() for p in net.collect_params().values()]
    trainer = Trainer(net.collect_params(), *PLAIN)
    for x, y in batches():
        samples = backward(net, share(x), share(y))
        for grad in held:
            grad *= 0.5
        trainer.step(samples)
    return weights(net)


@behaviour("several backward passes before a step: the last counts")
def several_backward_passes(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for i, (x, y) in enumerate(batches(6)):
        samples = backward(net, share(x), share(y))
        if i % 2:
            trainer.step(samples)
    return weights(net)


@behaviour("`grad_req='add'`: gradients of several batches, `zero_grad()`")
def accumulation(Trainer, share):
    net = mlp()
    net.collect_params().setattr("grad_req", "add")
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    samples = 0
    for i, (x, y) in enumerate(batches(9)):
        samples += backward(net, share(x), share(y))
        if i % 3 == 2:
            trainer.step(samples)
            net.collect_params().zero_grad()
            samples = 0
    return weights(net)


@behaviour("`grad_req` changed between 'write' and 'add' in mid-run")
def write_and_add(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for grad_req in ("write", "add", "write", "add"):
        net.collect_params().setattr("grad_req", grad_req)
        for x, y in batches(2):
            trainer.step(backward(net, share(x), share(y)))
            net.collect_params().zero_grad()
    return weights(net)


@behaviour("`zero_grad()` of a parameter, of all")
def zero_grad(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for x, y in batches():
        net.collect_params().zero_grad()
        samples = backward(net, share(x), share(y))
        net[0].weight.zero_grad()
        trainer.step(samples)
    return weights(net)


@behaviour("a graph kept over steps (`retain_graph=True`)")
def retained_graph(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for x, y in batches():
        x, y = share(x), share(y)
        with autograd.record():
            loss = LOSS(net(x), y)
        loss.backward(retain_graph=True)
        trainer.step(len(x))
        loss.backward()
        trainer.step(len(x))
    return weights(net)


@behaviour("several losses in one `autograd.backward`")
def several_losses(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for x, y in batches():
        x, y = share(x), share(y)
        with autograd.record():
            out = net(x)
            losses = [LOSS(out, y), (out**2).sum(axis=1)]
        autograd.backward(losses)
        trainer.step(len(x))
    return weights(net)


@behaviour("a penalty on gradients (`autograd.grad` with `create_graph`)")
def gradient_penalty(Trainer, share):
    net = gluon.nn.Dense(CLASSES, in_units=FEATURES)
    mx.random.seed(5)
    net.initialize(mx.init.Xavier())
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for x, y in batches():
        x, y = share(x).copy(), share(y)
        x.attach_grad()
        with autograd.record():
            out = mx.nd.sigmoid(net(x))
            (slope,) = autograd.grad(out, [x], create_graph=True, retain_graph=True)
            loss = LOSS(out, y) + (slope * slope).sum(axis=1)
        loss.backward()
        trainer.step(len(x))
    return weights(net)


class _Cube(autograd.Function):
    def forward(self, x):
        self.save_for_backward(x)
        return x**3

    def backward(self, dy):
        (x,) = self.saved_tensors
        return 3 * x**2 * dy


@behaviour("an `autograd.Function` of the script's own")
def own_function(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(lambda x: _Cube()(net(x)), trainer, share)
    return weights(net)
