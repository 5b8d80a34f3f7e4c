"""MXNet's contributed parts that take a trainer: AMP's loss scaling and the Estimator."""

from __future__ import annotations

import logging

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp
from mxnet.gluon.contrib.estimator import Estimator

from ..registry import theme
from ..scripts import LOSS, MOMENTUM, batches, mlp, weights

behaviour = theme("States, loss scaling, Estimator")


def _init_trainer(trainer):
    """Without ``amp.init``, which patches the process for good."""
    had = amp.amp._amp_initialized
    amp.amp._amp_initialized, amp.amp._loss_scaler = True, amp.loss_scaler.LossScaler()
    amp.amp._amp_loss_scale_initialized = False
    try:
        amp.init_trainer(trainer)
    finally:
        amp.amp._amp_initialized = had


def _scaled(Trainer, share, unscale):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    _init_trainer(trainer)
    for number, (x, y) in enumerate(batches(5)):
        with autograd.record():
            loss = LOSS(net(share(x)), share(y)) * (np.inf if number == 2 else 1)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        if unscale:
            amp.unscale(trainer)
        trainer.step(len(share(x)))
    return np.append(weights(net), trainer._amp_loss_scaler.loss_scale)


@behaviour("AMP: `init_trainer`, `scale_loss`; a step that overflows is skipped")
def loss_scaling(Trainer, share):
    return _scaled(Trainer, share, unscale=False)


@behaviour("AMP: `unscale`")
def loss_unscaled(Trainer, share):
    return _scaled(Trainer, share, unscale=True)


@behaviour("`Estimator(net, loss, trainer=...).fit(...)` with its handlers")
def estimator(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    fitted = Estimator(net, LOSS, mx.metric.Accuracy(), trainer=trainer, context=mx.cpu())
    fitted.logger.setLevel(logging.ERROR)
    pairs = [(share(x), share(y)) for x, y in batches()]
    data = gluon.data.ArrayDataset(*(np.concatenate([a.asnumpy() for a in p]) for p in zip(*pairs)))
    loader = gluon.data.DataLoader(data, batch_size=len(pairs[0][0]))
    fitted.fit(loader, val_data=loader, epochs=2)
    return weights(net)
