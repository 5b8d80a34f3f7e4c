"""What counts as waiting for input: that the network had nothing to do, not that Python waited."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, Iterator, Tuple

import mxnet as mx
import numpy as np
import pytest
import tensorboardX  # noqa: F401 (sets environment variables when imported: not in a test)
from mxnet import gluon

from gluon_esgd import engine
from gluon_esgd.telemetry import TrainingLog

STEPS, SECONDS = 12, 0.04


def work(monkeypatch: pytest.MonkeyPatch, weight: mx.nd.NDArray) -> None:
    """Keep the engine's only thread for operators busy, as a network does, but take no core."""
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_PRIORITIZED", 0)  # FnProperty::kNormal
        engine._push(lambda: time.sleep(SECONDS), [], [weight], "a network")


def numpy_batches() -> Iterator[mx.nd.NDArray]:
    for _ in range(STEPS):
        yield mx.nd.array(np.zeros((4, 4)))  # waits for the engine


def slow_batches() -> Iterator[mx.nd.NDArray]:
    for _ in range(STEPS):
        time.sleep(2 * SECONDS)
        yield mx.nd.zeros(4)


def shares(
    monkeypatch: pytest.MonkeyPatch, batches: Iterator[Any], has_trainer: bool, works: bool = True
) -> Tuple[float, float]:
    """Return which share of the time Python waited for batches, and that of the log."""
    param = gluon.Parameter("w", shape=(4,))
    param.initialize()
    trainer = SimpleNamespace(_params=[param]) if has_trainer else None
    log, waited = TrainingLog(trainer, every=1000), 0.0
    source = log.batches(batches)
    mx.nd.waitall()
    while True:
        start = time.monotonic()
        if next(source, None) is None:
            break
        waited += time.monotonic() - start
        if works:
            work(monkeypatch, param.data())
        log.update(0.0 if has_trainer else param.data(), 4)
    mx.nd.waitall()
    seconds, input_s = log.seconds, log.input_s
    log.close(flush=False)
    return waited / seconds, input_s / seconds


@pytest.mark.parametrize("has_trainer", [True, False])
def test_waiting_for_the_engine_is_not_waiting_for_input(
    monkeypatch: pytest.MonkeyPatch, has_trainer: bool
) -> None:
    python, network = shares(monkeypatch, numpy_batches(), has_trainer)
    assert python > 0.6, "the source does wait for the engine"
    assert network < 0.3


def test_a_slow_source_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares(monkeypatch, slow_batches(), has_trainer=True, works=False)[1] > 0.8


def test_what_the_network_does_meanwhile_is_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch takes twice as long as the network: half of the time there is nothing to do."""
    python, network = shares(monkeypatch, slow_batches(), has_trainer=True)
    assert python > 0.8
    assert 0.25 < network < 0.75


def test_marks_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(engine._operations)
    shares(monkeypatch, numpy_batches(), has_trainer=True)
    mx.nd.waitall()
    assert len(engine._operations) <= before
