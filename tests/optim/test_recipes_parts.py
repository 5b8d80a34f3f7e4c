"""Schedules, and what weight decay leaves alone."""

from __future__ import annotations

import mxnet as mx
import pytest
from mxnet import gluon

from gluon_esgd.optim import SCHEDULES, learning_rate_schedule, no_weight_decay


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
