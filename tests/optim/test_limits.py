"""What is refused of an optimizer, by name and with the reason."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest

from gluon_esgd.optim import check_optimizer

from ..training.optimizers import SETTINGS, make

ALONE = {"rule": "sgd", "size": 1, "num_clients": 1, "num_devices": 1}


class MyFtrl(mx.optimizer.Ftrl):
    """As a script would define it."""


class MyNoise(mx.optimizer.SGLD):
    """As a script would define it."""


REFUSED = [
    ("ftrl", {"rule": "esgd"}, "'ftrl' computes its weights anew .* rule='esgd' would be lost"),
    ("ftrl", {"rule": "asgd"}, "'ftrl' computes its weights anew .* rule='asgd' would be lost"),
    ("ftml", {"rule": "esgd"}, "'ftml' computes its weights anew"),
    (MyFtrl(), {"rule": "esgd"}, r"'myftrl' \(a subclass of Ftrl\) computes its weights anew"),
    ("sgld", {"size": 2}, "'sgld' draws its own noise .* here 2 .* in a client, 1 client"),
    ("sgld", {"size": 2, "rule": "esgd"}, "'sgld' draws its own noise"),
    ("sgld", {"num_clients": 3}, r"'sgld' draws its own noise .* 3 client\(s\) in lockstep"),
    ("sgld", {"num_devices": 2}, r"'sgld' draws its own noise .* 2 device\(s\) in a rank"),
    (MyNoise(), {"size": 2}, r"'mynoise' \(a subclass of SGLD\) draws its own noise"),
    ("lbsgd:cumulative", {"num_devices": 2}, "'lbsgd' keeps sums and counts .* 2 devices"),
    (
        mx.optimizer.LBSGD(lr_scheduler=mx.lr_scheduler.FactorScheduler(2)),
        {"num_devices": 2},
        "'lbsgd' keeps .* use one device in each rank, or batch_scale=1 and no lr_scheduler",
    ),
]


def _made(what: Any) -> mx.optimizer.Optimizer:
    return make(what) if isinstance(what, str) else what


@pytest.mark.parametrize(("optimizer", "job", "message"), REFUSED)
def test_refused(optimizer: Any, job: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"optimizer {message}"):
        check_optimizer(_made(optimizer), **{**ALONE, **job})


@pytest.mark.parametrize(
    ("optimizer", "job"),
    [
        *[(form, {"size": 2, "num_clients": 2}) for form in SETTINGS if form != "sgld"],
        *[
            (form, {"size": 2, "num_clients": 2, "num_devices": 2, "rule": "esgd"})
            for form in SETTINGS
            if form not in ("sgld", "ftrl", "ftml", "lbsgd:cumulative")
        ],
        ("sgld", {"num_clients": 2, "rule": "esgd"}),
        ("lbsgd:cumulative", {"size": 2, "rule": "esgd"}),
    ],
)
def test_taken(optimizer: str, job: dict) -> None:
    check_optimizer(_made(optimizer), **{**ALONE, **job})
