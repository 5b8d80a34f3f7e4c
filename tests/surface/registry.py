"""What a row of docs/compatibility.md is: a small training script, and where it may end otherwise.

To add one, write a function in a file of `behaviours/`::

    @behaviour("what a user would call it")
    def short_name(Trainer, share):
        net = mlp()
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        train(net, trainer, share)
        return weights(net)

`Trainer` makes a ``gluon.Trainer`` or an `ElasticTrainer`, `share` cuts a rank's part out of a
batch. What it returns must be the same numbers in all eight ways to run. Then write the page anew:
``python -m tests.surface.table > docs/compatibility.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import numpy as np

__all__ = [
    "BEHAVIOURS",
    "DISTRIBUTED",
    "MPI",
    "SUMMED",
    "Behaviour",
    "Different",
    "Refused",
    "theme",
]

Script = Callable[[Callable, Callable], np.ndarray]

#: Ways in which a client has several ranks.
MPI = ("pure MPI", "mpi-sgd", "mpi-asgd", "mpi-esgd")
#: Ways in which gradients are summed over ranks.
SUMMED = (*MPI, "dist-sgd")
DISTRIBUTED = ("pure MPI", "dist-sgd", "dist-asgd", "dist-esgd", "mpi-sgd", "mpi-asgd", "mpi-esgd")


@dataclass(frozen=True)
class Refused:
    """In `ways` every rank raises what matches `error` ("ValueError: ..."); `reason` says why."""

    ways: Sequence[str]
    error: str
    reason: str


@dataclass(frozen=True)
class Different:
    """In `ways` the numbers are ``expected(those of gluon.Trainer)``; `reason` says why."""

    ways: Sequence[str]
    expected: Callable[[np.ndarray], np.ndarray]
    reason: str


@dataclass(frozen=True)
class Behaviour:
    """A row: its theme and title, the script, and where it does not behave as under Gluon."""

    theme: str
    title: str
    script: Script
    but: Tuple[Union[Refused, Different], ...]
    ends_the_run: bool

    @property
    def name(self) -> str:
        """What tests call it."""
        return self.script.__name__

    def exception(self, way: str) -> Optional[Union[Refused, Different]]:
        """What is otherwise in `way`; None where it is as under ``gluon.Trainer``."""
        return next((b for b in self.but if way in b.ways), None)


#: By name, in the order of the table.
BEHAVIOURS: Dict[str, Behaviour] = {}


def theme(name: str) -> Callable[..., Callable[[Script], Script]]:
    """Return the decorator that enters the behaviours of one theme.

    It takes a title, and as `but` what is `Refused` or `Different`. With `ends_the_run`
    ranks are of no use afterwards.
    """

    def behaviour(title: str, *but: Any, ends_the_run: bool = False) -> Callable[[Script], Script]:
        def enter(script: Script) -> Script:
            assert script.__name__ not in BEHAVIOURS, f"{script.__name__} is there already"
            titles = {b.title for b in BEHAVIOURS.values()}
            assert title not in titles, f"{title!r} is there already"
            BEHAVIOURS[script.__name__] = Behaviour(name, title, script, but, ends_the_run)
            return script

        return enter

    return behaviour
