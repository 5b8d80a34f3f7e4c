"""The table of optimizers in the docs is what a trial says."""

from __future__ import annotations

import warnings
from typing import Any

from mxnet import gluon
from mxnet.base import MXNetError

from gluon_esgd.optim import check_optimizer

from ..pool import ROOT
from ..training.optimizers import SAMPLES, SETTINGS, backward, make, parameters, registered

HEAD = (
    "| optimizer | ranks | devices | clients, `sgd` | clients, `esgd`, `asgd` | fp16, no masters |"
)


def _taken(name: str, **job: Any) -> str:
    """Whether a job takes every form of an optimizer, or none, or some."""
    alone = {"rule": "sgd", "size": 1, "num_clients": 1, "num_devices": 1}
    taken = []
    for form in (f for f in SETTINGS if f.split(":")[0] == name):
        try:
            check_optimizer(make(form), **{**alone, **job})
        except ValueError:
            taken.append(False)
        else:
            taken.append(True)
    return "yes" if all(taken) else "some" if any(taken) else "no"


def _half_without_masters(name: str) -> str:
    params = parameters("float16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = gluon.Trainer(params, make(name), kvstore=None)
        backward(params, 0, 0, SAMPLES)
        try:
            trainer.step(SAMPLES)
        except MXNetError:
            return "no"
    return "yes"


def _row(name: str) -> str:
    cells = [
        _taken(name, size=2),
        _taken(name, num_devices=2),
        _taken(name, num_clients=2),
        _taken(name, num_clients=2, rule="esgd"),
        _half_without_masters(name),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def test_the_table_is_in_step() -> None:
    expected = "\n".join([HEAD, "|---|---|---|---|---|---|", *map(_row, registered())])
    assert expected in (ROOT / "docs" / "optimizers.md").read_text(), expected
