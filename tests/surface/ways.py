"""The eight ways to run, and what a rank does with a behaviour in them."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, Callable, List, NamedTuple, Optional

import mxnet as mx
import numpy as np
from mxnet import gluon

from ..pool import Shape
from .behaviours import BEHAVIOURS

_FAR = 1000  # an interval that no script comes to: exchanges are tests/training's


class Way(NamedTuple):
    """A column of the table, and the job in which it is tried (none: this process)."""

    name: str
    shape: Optional[Shape]


WAYS = (
    Way("one process", None),
    Way("pure MPI", Shape(2)),
    *(Way(f"dist-{rule}", Shape(2, 2, 1, rule)) for rule in ("sgd", "asgd", "esgd")),
    *(Way(f"mpi-{rule}", Shape(4, 2, 1, rule)) for rule in ("sgd", "asgd", "esgd")),
)


class Outcome(NamedTuple):
    """What a script came to on one rank.

    `error` is "Type: message" where it raised. `center` says whether all numbers of the center
    were finite, `end` is a digest of the weights after ``finish()``.
    """

    numbers: Optional[np.ndarray]
    error: str = ""
    center: bool = True
    end: str = ""


def _whole(batch: Any) -> Any:
    return batch


def _run(name: str, make: Callable, share: Callable) -> Outcome:
    try:
        numbers = BEHAVIOURS[name].script(make, share)
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}")
    return Outcome(np.asarray(numbers, np.float64))


def _gluon(
    params: Any,
    optimizer: Any,
    optimizer_params: Any = None,
    kvstore: Any = "device",
    **kwargs: Any,
) -> gluon.Trainer:
    if isinstance(kvstore, str) and "dist" in kvstore:  # which MXNet makes in its own jobs only
        kvstore, kwargs = "device", {}
    return gluon.Trainer(params, optimizer, optimizer_params, kvstore, **kwargs)


@lru_cache(maxsize=None)
def under_gluon(name: str) -> Outcome:
    """What ``gluon.Trainer`` makes of the whole batches with the script's own arguments."""
    return _run(name, _gluon, _whole)


@lru_cache(maxsize=None)
def reference(name: str) -> np.ndarray:
    """The same with the update in the trainer, where a distributed run always makes it."""

    def make(*args: Any, **kwargs: Any) -> gluon.Trainer:
        kwargs.update(update_on_kvstore=False, compression_params=None)
        return _gluon(*args, **kwargs)

    numbers, error, *_ = _run(name, make, _whole)
    assert numbers is not None, error
    return numbers


def alone(name: str) -> Outcome:
    """What `ElasticTrainer` makes of it in this process."""
    from gluon_esgd import ElasticTrainer

    return _run(name, ElasticTrainer, _whole)


def on_rank(name: str) -> Outcome:
    """What `ElasticTrainer` makes of it on this rank of a job; every client has the same data."""
    from gluon_esgd import ElasticTrainer, world

    here = world()
    settings = {"interval": _FAR} if here.settings.rule in ("asgd", "esgd") else {}
    made: List[Any] = []

    def make(*args: Any, **kwargs: Any) -> ElasticTrainer:
        made.append(ElasticTrainer(*args, **settings, **kwargs))
        return made[-1]

    def share(batch: Any) -> Any:
        ends = [len(batch) * (here.rank + i) // here.size for i in (0, 1)]
        return batch[ends[0] : ends[1]]

    outcome = _run(name, make, share)
    if outcome.numbers is None:
        return outcome
    used = [trainer for trainer in made if trainer.counters.steps]
    for trainer in used:
        trainer.finish()
    return outcome._replace(center=all(map(_finite_center, used)), end=_digest(used))


def _finite_center(trainer: Any) -> bool:
    with trainer.center():
        return all(np.isfinite(p.list_data()[0].asnumpy()).all() for p in trainer._params)


def _digest(trainers: List[Any]) -> str:
    sha = hashlib.sha256()
    mx.nd.waitall()
    for trainer in trainers:
        for param in trainer._params:
            if param._differentiable:  # ranks have running statistics of their own
                sha.update(param.list_data()[0].asnumpy().tobytes())
    return sha.hexdigest()
