"""Parameters that are not trained, or not always."""

from __future__ import annotations

import numpy as np
from mxnet import gluon

from ..registry import theme
from ..scripts import CLASSES, FEATURES, MOMENTUM, PLAIN, backward, batches, mlp, train, weights

behaviour = theme("Frozen parameters")


@behaviour("`grad_req='null'` before the trainer is made")
def frozen(Trainer, share):
    net = mlp()
    net[0].collect_params().setattr("grad_req", "null")
    train(net, Trainer(net.collect_params(), *MOMENTUM), share)
    return weights(net)


@behaviour("`lr_mult=0`")
def frozen_by_rate(Trainer, share):
    net = mlp()
    net[0].collect_params().setattr("lr_mult", 0)
    train(net, Trainer(net.collect_params(), *MOMENTUM), share)
    return weights(net)


def _for_a_while(Trainer, share, attribute, values, **hybrid):
    net = mlp()
    if hybrid:
        net.hybridize(**hybrid)
    trainer = Trainer(net.collect_params(), *PLAIN)
    for i, (x, y) in enumerate(batches(6)):
        # The whole layer: MXNet leaves a bias without gradient where only the weight is frozen.
        net[0].collect_params().setattr(attribute, values[i in (2, 3)])
        trainer.step(backward(net, share(x), share(y)))
    return weights(net)


@behaviour("`grad_req='null'` in mid-run, and thawed")
def frozen_for_a_while(Trainer, share):
    return _for_a_while(Trainer, share, "grad_req", ("write", "null"))


@behaviour("the same under `hybridize(static_alloc=True, static_shape=True)`")
def frozen_for_a_while_static(Trainer, share):
    static = {"static_alloc": True, "static_shape": True}
    return _for_a_while(Trainer, share, "grad_req", ("write", "null"), **static)


@behaviour("`lr_mult=0` in mid-run, and back")
def frozen_for_a_while_by_rate(Trainer, share):
    return _for_a_while(Trainer, share, "lr_mult", (1.0, 0.0))


@behaviour("made and stepped with frozen parameters only, thawed later")
def thawed(Trainer, share):
    net = mlp()
    net.collect_params().setattr("grad_req", "null")
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    trainer.step(1)
    net.collect_params().setattr("grad_req", "write")
    train(net, trainer, share)
    return weights(net)


class _Scaled(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.scale = self.params.get_constant("scale", np.full((1, FEATURES), 0.5))
            self.dense = gluon.nn.Dense(CLASSES, in_units=FEATURES)

    def hybrid_forward(self, F, x, scale):
        return self.dense(F.broadcast_mul(x, scale))


@behaviour("`gluon.Constant`")
def constants(Trainer, share):
    net = _Scaled()
    net.initialize("zeros")
    train(net, Trainer(net.collect_params(), *MOMENTUM), share)
    return weights(net)
