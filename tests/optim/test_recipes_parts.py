"""Schedules, and what weight decay leaves alone."""

from __future__ import annotations

from pathlib import Path

import mxnet as mx
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer
from gluon_esgd.optim import (
    SCHEDULES,
    EpochSchedule,
    learning_rate_schedule,
    no_weight_decay,
)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("steps, warmup", [(90, 9), (90, 0), (7, 3), (1, 0)])
def test_rates_rise_and_fall(kind: str, steps: int, warmup: int) -> None:
    schedule = learning_rate_schedule(kind, 0.4, steps, warmup)
    rates = [schedule(step) for step in range(1, steps + 1)]
    assert max(rates) <= 0.4
    rising, falling = rates[: max(0, warmup - 1)], rates[warmup:]
    assert rising == pytest.approx([0.4 * step / warmup for step in range(1, warmup)])
    assert all(later <= earlier for earlier, later in zip(falling, falling[1:]))
    if steps == 90:
        assert rates[warmup] == pytest.approx(0.4, rel=0.03)
        assert rates[-1] < 0.4 * 0.0011


def test_steps_are_those_of_ninety_epochs() -> None:
    schedule = learning_rate_schedule("step", 1.0, 90, 0)
    rates = [schedule(step) for step in range(1, 91)]
    assert [rates[at] for at in (29, 30, 59, 60, 79, 80)] == pytest.approx(
        [1, 0.1, 0.1, 0.01, 0.01, 0.001]
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("linear", 0.1, 10), "kind='linear' must be one of cosine, step, poly"),
        (("cosine", 0.1, 10, 10), "warmup_steps=10 must be from 0 to below steps=10"),
        (("cosine", 0.1, 0), "warmup_steps=0 must be from 0 to below steps=0"),
    ],
)
def test_what_cannot_be_is_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate_schedule(*arguments)


def test_epochs_count_and_not_updates() -> None:
    """Half of the run was made with four times as many updates in an epoch."""
    schedule = EpochSchedule("cosine", 0.4, epochs=8, warmup_epochs=1)
    assert schedule(1) == 0.0, "before the first epoch"
    expected = learning_rate_schedule("cosine", 0.4, 80, 10)
    schedule.begin_epoch(0, updates=40, num_update=0)
    assert schedule(160) == pytest.approx(learning_rate_schedule("cosine", 0.4, 320, 40)(160))
    schedule.begin_epoch(4, updates=10, num_update=160)
    assert [schedule(160 + k) for k in range(1, 41)] == [expected(40 + k) for k in range(1, 41)]
    schedule.begin_epoch(4.5, updates=10, num_update=165)
    assert schedule(166) == expected(46)


def test_a_checkpoint_does_not_replace_what_the_script_wants(tmp_path: Path) -> None:
    def trainer(epochs: int) -> gluon.Trainer:
        net = gluon.nn.Dense(1, in_units=1)
        net.initialize()
        schedule = EpochSchedule("cosine", 0.4, epochs)
        made = ElasticTrainer(net.collect_params(), "sgd", {"lr_scheduler": schedule})
        made._optimizer.lr_scheduler.begin_epoch(0, 1, 0)
        return made

    trainer(1).save_states(str(tmp_path / "states"))
    longer = trainer(4)
    longer.load_states(str(tmp_path / "states"))
    longer.optimizer.lr_scheduler.begin_epoch(1, 1, 1)
    assert longer.optimizer.lr_scheduler(2) == pytest.approx(0.2)


def test_decay_pulls_at_weights_only() -> None:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(2, 1, in_channels=2), gluon.nn.BatchNorm(in_channels=2))
    net.initialize()
    for param in net.collect_params(".*(weight|bias|gamma|beta)").values():
        param.set_data(mx.nd.ones(param.shape))
    trainer = gluon.Trainer(
        no_weight_decay(net.collect_params()), "sgd", {"learning_rate": 1.0, "wd": 0.5}
    )
    with mx.autograd.record():
        loss = net(mx.nd.zeros((1, 2, 1, 1))) * 0
    loss.backward()
    trainer.step(1)
    after = {
        name.split("_")[-1]: p.data().asnumpy().mean() for name, p in net.collect_params().items()
    }
    assert after["weight"] == 0.5
    assert after["bias"] == after["gamma"] == after["beta"] == 1
