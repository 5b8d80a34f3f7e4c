"""Optimizers that an exchange, or a copy of the weights on another rank, would break."""

from __future__ import annotations

import mxnet as mx

from ..registry import DISTRIBUTED, Refused, theme
from ..scripts import mlp, train, weights

behaviour = theme("The optimizer")

_ELASTIC = ("dist-asgd", "dist-esgd", "mpi-asgd", "mpi-esgd")
_REBUILT = "It computes weights anew from its own state, so what an exchange adds would be lost."
_NOISE = "It draws noise, other on every rank: copies of weights that must be equal would part."


def _named(Trainer, share, name):
    net = mlp()
    mx.random.seed(7)
    train(net, Trainer(net.collect_params(), name, {"learning_rate": 0.1}), share)
    return weights(net)


@behaviour("`ftrl`", Refused(_ELASTIC, "ValueError: optimizer 'ftrl'", _REBUILT))
def ftrl(Trainer, share):
    return _named(Trainer, share, "ftrl")


@behaviour("`ftml`", Refused(_ELASTIC, "ValueError: optimizer 'ftml'", _REBUILT))
def ftml(Trainer, share):
    return _named(Trainer, share, "ftml")


@behaviour(
    "`sgld`",
    Refused(
        [way for way in DISTRIBUTED if way not in ("dist-asgd", "dist-esgd")],
        "ValueError: optimizer 'sgld'",
        _NOISE,
    ),
)
def sgld(Trainer, share):
    return _named(Trainer, share, "sgld")
