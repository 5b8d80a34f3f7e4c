"""A step: batches, losses, gradients and what a script does with them."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..registry import MPI, SUMMED, Different, Refused, theme
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
    together,
    train,
    weights,
)

behaviour = theme("Steps and gradients")


@behaviour("changing batch sizes, a smaller last batch")
def batch_sizes(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for size in (12, 24, 6, 12, 2):
        x, y = batches(1, size=size)[0]
        trainer.step(backward(net, share(x), share(y)))
    return weights(net)


@behaviour("a loss that is a mean, with `step(1)`")
def mean_loss(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for x, y in batches():
        with autograd.record():
            loss = LOSS(net(share(x)), share(y)).mean()
        loss.backward()
        trainer.step(1)
    return weights(net)


@behaviour("`allreduce_grads()`, then `update()`")
def allreduce_and_update(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for x, y in batches():
        samples = backward(net, share(x), share(y))
        trainer.allreduce_grads()
        trainer.update(samples)
    return weights(net)


@behaviour("gradients clipped between the two (`gluon.utils.clip_global_norm`)")
def clip_between(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    for x, y in batches():
        samples = backward(net, share(x), share(y))
        trainer.allreduce_grads()
        grads = [p.grad() for p in net.collect_params().values()]
        gluon.utils.clip_global_norm(grads, 0.2 * samples)
        trainer.update(samples)
    return weights(net)


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


@behaviour("parameters that are not used, with `ignore_stale_grad=True`")
def unused(Trainer, share):
    net, idle = mlp(), mlp(FEATURES, CLASSES)
    trainer = Trainer(together(net, idle), *MOMENTUM)
    train(net, trainer, share, ignore_stale_grad=True)
    return weights(net, idle)


@behaviour("heads used in turn, with `ignore_stale_grad=True`")
def heads_in_turn(Trainer, share):
    body, heads = mlp(FEATURES, 8), [mlp(8, CLASSES), mlp(8, CLASSES)]
    trainer = Trainer(together(body, *heads), *MOMENTUM)
    for i, (x, y) in enumerate(batches(6)):
        head = heads[i % 2]
        samples = backward(lambda x, head=head: head(body(x)), share(x), share(y))
        trainer.step(samples, ignore_stale_grad=True)
    return weights(body, *heads)


@behaviour("`allreduce_grads()`, then `update(..., ignore_stale_grad=True)`")
def update_in_turn(Trainer, share):
    body, heads = mlp(FEATURES, 8), [mlp(8, CLASSES), mlp(8, CLASSES)]
    trainer = Trainer(together(body, *heads), *MOMENTUM)
    for i, (x, y) in enumerate(batches(6)):
        head = heads[i % 2]
        samples = backward(lambda x, head=head: head(body(x)), share(x), share(y))
        trainer.allreduce_grads()
        trainer.update(samples, ignore_stale_grad=True)
    return weights(body, *heads)


@behaviour(
    "training on after Gluon's UserWarning about a gradient that backward did not write",
    Refused(
        SUMMED,
        r"^CollectiveError: .*gradient of \w+ was not updated by backward",
        "The UserWarning comes on the rank itself, as in Gluon. Other ranks may have had their "
        "gradient, so a later `step()` raises CollectiveError on all of them.",
    ),
    ends_the_run=True,
)
def stale_gradient(Trainer, share):
    net, idle = mlp(), mlp(FEATURES, CLASSES)
    trainer = Trainer(together(net, idle), *PLAIN)
    try:
        train(net, trainer, share, 1)
        raise AssertionError("no UserWarning")
    except UserWarning as warning:
        assert "has not been updated by backward since last `step`" in str(warning)
    for _ in range(2):
        train(lambda x: net(x) + idle(x), trainer, share, 2)
        seen = weights(net, idle)  # waits
    return seen


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


@behaviour("evaluation between steps")
def evaluation_between(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    seen = []
    probe = batches(1)[0][0]
    for x, y in batches():
        trainer.step(backward(net, share(x), share(y)))
        seen.append(net(probe).asnumpy().ravel())
    return np.concatenate(seen)


def _step(trainer, samples):
    trainer.step(samples)


@behaviour("several devices per process")
def several_devices(Trainer, share):
    return _on_two_devices(Trainer, share, _step)


@behaviour("several devices per process, `update_on_kvstore=True`")
def several_devices_on_store(Trainer, share):
    return _on_two_devices(Trainer, share, _step, update_on_kvstore=True)


def _then_update(trainer, samples):
    trainer.allreduce_grads()
    trainer.update(samples)


@behaviour(
    "several devices per process: `allreduce_grads()`, `update()`",
    Refused(
        ("one process",),
        r"^AssertionError: allreduce_grads\(\) when parameters are updated on kvstore",
        "As in Gluon: its default store updates by itself where there are two devices; make the "
        "trainer with `update_on_kvstore=False`.",
    ),
)
def several_devices_in_two_calls(Trainer, share):
    return _on_two_devices(Trainer, share, _then_update)


@behaviour("the same with `update_on_kvstore=False`")
def several_devices_without_store(Trainer, share):
    return _on_two_devices(Trainer, share, _then_update, update_on_kvstore=False)


def _on_two_devices(Trainer, share, step, **kwargs):
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = mlp(ctx=contexts)
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.2)
    settings = {"momentum": 0.9, "lr_scheduler": schedule}
    trainer = Trainer(net.collect_params(), "sgd", settings, **kwargs)
    for x, y in batches():
        xs, ys = (gluon.utils.split_and_load(share(part), contexts) for part in (x, y))
        with autograd.record():
            losses = [LOSS(net(a), b) for a, b in zip(xs, ys)]
        autograd.backward(losses)
        step(trainer, len(share(x)))
    return np.concatenate([weights(net, ctx=ctx) for ctx in contexts])
