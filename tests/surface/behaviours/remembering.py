"""What outlives a trainer: its states in files."""

from __future__ import annotations

import os
import tempfile

from mxnet import gluon, lr_scheduler

from ..registry import theme
from ..scripts import MOMENTUM, mlp, train, weights

behaviour = theme("States, loss scaling, Estimator")


def _interrupted(Trainer, share, optimizer, settings):
    """Trained, saved, and trained on by another trainer of another network from the files."""
    net, other = mlp(), mlp(seed=11)
    trainer = Trainer(net.collect_params(), optimizer, settings())
    train(net, trainer, share, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trainer.states")
        trainer.save_states(path)
        net.save_parameters(path + ".params")
        resumed = Trainer(other.collect_params(), optimizer, settings())
        other.load_parameters(path + ".params")
        resumed.load_states(path)
    train(other, resumed, share, 4)
    return weights(other)


@behaviour("`save_states`, `load_states`: momentum")
def saved_momentum(Trainer, share):
    return _interrupted(Trainer, share, MOMENTUM[0], lambda: dict(MOMENTUM[1]))


@behaviour("`save_states`, `load_states`: update counts and a scheduler")
def saved_counts(Trainer, share):
    return _interrupted(
        Trainer,
        share,
        "adam",
        lambda: {"lr_scheduler": lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.01)},
    )


@behaviour("`load_states` in mid-run: back to where the states were saved")
def loaded_states_in_mid_run(Trainer, share):
    net = mlp()
    trainer = Trainer(net.collect_params(), *MOMENTUM)
    train(net, trainer, share, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trainer.states")
        trainer.save_states(path)
        train(net, trainer, share, 2)
        trainer.load_states(path)
    train(net, trainer, share, 4)
    return weights(net)


@behaviour("`load_states` of a file that `gluon.Trainer` wrote")
def loaded_states_of_gluon(Trainer, share):
    net = mlp()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trainer.states")
        before = gluon.Trainer(net.collect_params(), *MOMENTUM)
        train(net, before, lambda batch: batch, 3)
        before.save_states(path)
        trainer = Trainer(net.collect_params(), *MOMENTUM)
        trainer.load_states(path)
    train(net, trainer, share, 4)
    return weights(net)
