"""Who wins when rule, interval, moving rate and delay are said in several places."""

from __future__ import annotations

from typing import Any, Dict

import mxnet as mx
import pytest

from gluon_esgd import ElasticSGD
from gluon_esgd.optim import Outer
from gluon_esgd.policy import Interval, resolve
from gluon_esgd.settings import Settings

SGD = mx.optimizer.create("sgd")


def _settings(**more: Any) -> Settings:
    return Settings(**{"num_clients": 4, "num_servers": 1, "scheduler": "127.0.0.1:9", **more})


SPLIT = {"num_servers": 0, "scheduler": None}
CASES = [
    ({}, SGD, "device", {}, ("esgd", 64, 0.225, 1)),
    ({}, SGD, "dist_sync", {}, ("sgd", 1, 0.225, 1)),
    ({}, SGD, "dist_device_sync", {}, ("sgd", 1, 0.225, 1)),
    ({}, SGD, "dist_async", {}, ("asgd", 1, 0.225, 1)),
    ({"rule": "esgd"}, SGD, "dist_async", {}, ("esgd", 64, 0.225, 1)),
    ({"rule": "esgd"}, SGD, "dist_async", {"rule": "sgd"}, ("sgd", 1, 0.225, 1)),
    ({}, ElasticSGD(interval=8, alpha=0.1), "device", {}, ("esgd", 8, 0.1, 1)),
    ({"interval": 4}, ElasticSGD(interval=8, beta=0.4), "device", {}, ("esgd", 4, 0.1, 1)),
    ({"beta": 0.8}, ElasticSGD(alpha=0.1), "device", {"interval": 2}, ("esgd", 2, 0.2, 1)),
    ({"alpha": 0.3, "lazy": 3}, SGD, "device", {"alpha": 0.2}, ("esgd", 64, 0.2, 3)),
    ({"lazy": 3}, SGD, "device", {"lazy": 0}, ("esgd", 64, 0.225, 0)),
    ({"num_clients": 1, "num_servers": 0}, SGD, "device", {}, ("sgd", 1, 0.45, 1)),
    ({"num_clients": 1}, SGD, "device", {"rule": "esgd"}, ("esgd", 64, 0.45, 1)),
    ({"rule": "sgd"}, SGD, "device", {"interval": 64, "lazy": 4}, ("sgd", 1, 0.225, 4)),
    ({"rule": "sgd"}, mx.optimizer.create("ftrl", beta=5), "device", {}, ("sgd", 1, 0.225, 1)),
    ({}, SGD, "device", {"interval": 8.0}, ("esgd", 8, 0.225, 1)),
    (SPLIT, SGD, "device", {}, ("esgd", 64, 0.225, 1)),
    (SPLIT, SGD, "dist_sync", {}, ("sgd", 1, 0.225, 1)),
]


@pytest.mark.parametrize(("settings", "optimizer", "kvstore", "given", "expected"), CASES)
def test_precedence(
    settings: Dict[str, Any], optimizer: Any, kvstore: str, given: Dict[str, Any], expected: tuple
) -> None:
    policy = resolve(_settings(**settings), optimizer, kvstore, **given)
    assert (policy.rule, policy.interval, policy.lazy) == (expected[0], expected[1], expected[3])
    assert policy.alpha == pytest.approx(expected[2])


@pytest.mark.parametrize(
    ("settings", "optimizer", "given", "message"),
    [
        ({"num_servers": 0}, SGD, {}, "4 clients need a server"),
        ({**SPLIT, "rule": "asgd"}, SGD, {}, "'asgd' is asynchronous, which needs a server, and "),
        (SPLIT, SGD, {"rule": "asgd"}, "the 4 clients .* have none: start with .* --servers 1"),
        (SPLIT, SGD, {"alpha": 0.41}, "alpha=0.41 must lie between 0 and"),
        ({"alpha": 0.5}, SGD, {}, r"alpha=0.5 .* 2 / \(1 \+ num_clients\) = 0.4 for 4 clients"),
        ({}, SGD, {"beta": 3.0}, "alpha=0.75 must lie"),
        ({}, SGD, {"interval": 4, "lazy": 5}, "lazy=5 must not be above interval=4"),
        ({"rule": "sgd"}, SGD, {"interval": 4, "lazy": 5}, "lazy=5 must not be above interval=4"),
        ({"rule": "asgd"}, SGD, {"lazy": 5}, "lazy=5 must not be above interval=1"),
        ({"rule": "sgd", "num_servers": 0}, SGD, {}, "4 clients need a server"),
        ({}, SGD, {"interval": "x"}, "interval='x' must be an integer of at least 1"),
        ({}, SGD, {"interval": float("nan")}, "interval=nan must be an integer of at least 1"),
        ({}, SGD, {"lazy": "x"}, "lazy='x' must be an integer of at least 0"),
        ({}, SGD, {"alpha": "x"}, "alpha='x' must be a number"),
    ],
)
def test_refused(
    settings: Dict[str, Any], optimizer: Any, given: Dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(_settings(**settings), optimizer, "device", **given)


@pytest.mark.parametrize("rule", ["asgd", "esgd"])
def test_the_momentum_of_the_center(rule: str) -> None:
    assert resolve(_settings(), SGD, "device", rule=rule).outer.is_plain
    given = {"momentum": 0.9}
    assert resolve(_settings(), SGD, "device", rule=rule, outer=given).outer == Outer(0.9, 1.0)
    assert resolve(_settings(), SGD, "device", rule=rule, outer={}).outer.is_plain


@pytest.mark.parametrize(
    ("outer", "rule", "message"),
    [
        (
            {"momentum": 0.9, "nesterov": 1},
            "esgd",
            "outer=.*nesterov.* must be a dict with momentum",
        ),
        (0.9, "esgd", "outer=0.9 must be a dict with momentum and learning_rate"),
        ({"momentum": "x"}, "esgd", "outer momentum='x' must be a number"),
        ({"momentum": 1.0}, "asgd", "outer momentum=1.0 must be at least 0 and below 1"),
        ({"learning_rate": 0}, "asgd", "outer learning_rate=0.0 must be above 0"),
        ({"momentum": 0.9}, "sgd", "under rule='sgd': there is no center to move"),
        (
            {"momentum": 0.9, "learning_rate": 2},
            "esgd",
            "outer momentum=0.9 and learning_rate=2 .*",
        ),
    ],
)
def test_a_momentum_that_cannot_be(outer: Any, rule: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(_settings(), SGD, "device", rule=rule, outer=outer)


def test_compression_is_the_trainers_or_the_jobs() -> None:
    assert resolve(_settings(), SGD, "device").compression is None
    assert resolve(_settings(compression="fp16"), SGD, "device").compression == "fp16"
    given = {"type": "fp16"}
    assert resolve(_settings(), SGD, "device", compression_params=given).compression == "fp16"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, [1, 2, 3, 4, 5]), (3, [3, 6, 9, 12]), (lambda s: 1 if s < 4 else 4, [1, 2, 3, 7, 11])],
)
def test_due_steps(value: Any, expected: list) -> None:
    interval = Interval(value)
    assert [s for s in range(1, 14) if interval.due(s)][: len(expected)] == expected


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_interval_function_must_return_steps(value: Any) -> None:
    with pytest.raises(ValueError, match="interval at step 1 is"):
        Interval(lambda _: value).due(1)
