"""A step: batches, losses, what is used in it, devices."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..registry import SUMMED, Refused, theme
from ..scripts import (
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

behaviour = theme("Steps")


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
