"""The optimizer, its settings, and what a script changes of them on the way."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import gluon

from ..registry import theme
from ..scripts import MOMENTUM, PLAIN, backward, batches, mlp, train, weights

behaviour = theme("The optimizer")


def _trained(Trainer, share, *optimizer):
    net = mlp()
    train(net, Trainer(net.collect_params(), *optimizer), share)
    return weights(net)


@behaviour("by name: `nag`")
def nag(Trainer, share):
    return _trained(Trainer, share, "nag", {"learning_rate": 0.1, "momentum": 0.9})


@behaviour("by name: `adam`")
def adam(Trainer, share):
    return _trained(Trainer, share, "adam", {"learning_rate": 0.01})


@behaviour("by name: `rmsprop`")
def rmsprop(Trainer, share):
    return _trained(Trainer, share, "rmsprop", {"learning_rate": 0.01, "centered": True})


@behaviour("by name, without settings")
def by_name_alone(Trainer, share):
    return _trained(Trainer, share, "sgd")


@behaviour("an instance")
def instance(Trainer, share):
    return _trained(Trainer, share, mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))


@behaviour("one instance in two trainers")
def instance_of_two(Trainer, share):
    nets, optimizer = [mlp(), mlp(seed=9)], mx.optimizer.Adam(learning_rate=0.01)
    trainers = [Trainer(net.collect_params(), optimizer) for net in nets]
    for i, (x, y) in enumerate(batches(6)):
        trainers[i % 2].step(backward(nets[i % 2], share(x), share(y)))
    return weights(*nets)


class _Sign(mx.optimizer.Optimizer):
    """As a script writes one."""

    def create_state(self, index, weight):
        return mx.nd.zeros_like(weight)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state *= 0.5
        state += grad * self.rescale_grad
        weight -= self._get_lr(index) * (state + self._get_wd(index) * weight)


@mx.optimizer.register
class SurfaceSign(_Sign):
    """The same, registered."""


@behaviour("an instance of a class of the script's own")
def own_class(Trainer, share):
    return _trained(Trainer, share, _Sign(learning_rate=0.1, wd=0.01))


@behaviour("a registered class of the script's own, by name")
def own_class_by_name(Trainer, share):
    return _trained(Trainer, share, "surfacesign", {"learning_rate": 0.1, "wd": 0.01})


@behaviour("`wd`, `clip_gradient`")
def decay_and_clip(Trainer, share):
    return _trained(
        Trainer, share, "sgd", {"learning_rate": 0.1, "wd": 0.01, "clip_gradient": 0.02}
    )


@behaviour("`rescale_grad` among the settings")
def rescale_grad(Trainer, share):
    return _trained(Trainer, share, "sgd", {"learning_rate": 0.1, "rescale_grad": 0.25})


@behaviour("`trainer.optimizer`, `trainer.learning_rate`")
def properties(Trainer, share):
    net = mlp()
    optimizer = mx.optimizer.SGD(learning_rate=0.1)
    trainer = Trainer(net.collect_params(), optimizer)
    assert trainer.optimizer is optimizer
    train(net, trainer, share, 2)
    return [trainer.learning_rate, optimizer.num_update, *weights(net)]


@behaviour("`set_learning_rate` at the next step")
def set_learning_rate(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    seen = [weights(net)]
    for rate in (1.0, 0.1, 0.01):
        trainer.set_learning_rate(rate)
        train(net, trainer, share, 1)
        seen.append(weights(net))
        assert trainer.learning_rate == rate
    return np.diff(seen, axis=0)


@behaviour("the optimizer's attributes changed in mid-run")
def changed_attributes(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(net, trainer, share, 2)
    trainer.optimizer.momentum = 0.5
    trainer.optimizer.wd = 0.1
    trainer.optimizer.clip_gradient = 0.05
    train(net, trainer, share)
    return weights(net)


@behaviour("schedulers count one per step")
def scheduler(Trainer, share):
    net = mlp()
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.5)
    trainer = Trainer(net.collect_params(), "sgd", {"lr_scheduler": schedule})
    rates = []
    for x, y in batches(6):
        trainer.step(backward(net, share(x), share(y)))
        rates.append(trainer.learning_rate)
    return [*rates, trainer.optimizer.num_update, *weights(net)]


@behaviour("a scheduler set in mid-run, `begin_num_update`")
def scheduler_set_late(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5, "begin_num_update": 7})
    train(net, trainer, share, 2)
    trainer.optimizer.lr_scheduler = mx.lr_scheduler.PolyScheduler(12, base_lr=0.4)
    train(net, trainer, share, 2)
    return [trainer.learning_rate, trainer.optimizer.num_update, *weights(net)]


@behaviour("`set_learning_rate` beside a scheduler raises Gluon's UserWarning")
def rate_beside_scheduler(Trainer, share):
    net = mlp()
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.5)
    trainer = Trainer(net.collect_params(), "sgd", {"lr_scheduler": schedule})
    try:
        trainer.set_learning_rate(0.1)
        raise AssertionError("no UserWarning")
    except UserWarning as warning:
        assert "LRScheduler of the optimizer has already been defined" in str(warning)
    train(net, trainer, share)
    return weights(net)


@behaviour("`lr_mult`, `wd_mult` of a parameter")
def multipliers(Trainer, share):
    net = mlp()
    net[0].weight.lr_mult, net[0].bias.wd_mult, net[1].weight.wd_mult = 0.1, 3.0, 0.0
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "wd": 0.1})
    train(net, trainer, share, 2)
    net[0].weight.lr_mult = 2.0
    train(net, trainer, share, 2)
    return weights(net)


@behaviour("`optimizer.set_lr_mult`, `set_wd_mult`")
def multipliers_of_the_optimizer(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *PLAIN)
    trainer.optimizer.set_lr_mult({0: 0.5, 1: 2.0})
    trainer.optimizer.set_wd_mult({2: 4.0})
    trainer.optimizer.wd = 0.1
    train(net, trainer, share)
    return weights(net)


@behaviour("`multi_precision` with fp16 weights (gradients filled by hand)")
def half_floats(Trainer, share):
    net = _parameter(np.linspace(-1, 1, 24).reshape(4, 6))
    settings = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
    trainer = Trainer([net], "sgd", settings)
    for x, _ in batches(5, size=8):
        x = share(x.round())  # so that half floats add up without rounding
        _fill(net, x.sum(axis=0).reshape((1, -1)).broadcast_to(net.shape))
        trainer.step(len(x))
    master = trainer._updaters[0].states[0][-1]
    return np.concatenate([net.data().asnumpy().ravel(), master.asnumpy().ravel()])


def _parameter(value, dtype="float16"):
    """One initialized parameter that is no network's."""
    param = gluon.Parameter("p", shape=value.shape, dtype=dtype, init=mx.init.Zero())
    param.initialize()
    param.set_data(mx.nd.array(value, dtype=dtype))
    return param


def _fill(param, gradient):
    """Put a gradient where backward would: there are no fp16 layers on the CPU."""
    for grad, data in zip(param.list_grad(), param.list_data()):
        grad[:] = gradient.astype(grad.dtype)
        data._fresh_grad = True
