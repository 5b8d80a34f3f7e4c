"""The learning rates of usual recipes, from MXNet's own schedulers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import mxnet as mx

__all__ = ["SCHEDULES", "EpochSchedule", "learning_rate_schedule"]

SCHEDULES = ("cosine", "step", "poly")
"""Names that `EpochSchedule` and `learning_rate_schedule` take."""

_DROPS = (1 / 3, 2 / 3, 8 / 9)  # of all steps: epochs 30, 60 and 80 of 90


def learning_rate_schedule(
    kind: str, base_lr: float, steps: int, warmup_steps: int = 0
) -> mx.lr_scheduler.LRScheduler:
    """Return a scheduler that rises to `base_lr` and falls to the end of the run.

    Parameters
    ----------
    kind : {'cosine', 'step', 'poly'}
        Half a cosine wave to 0; a tenth at 1/3, 2/3 and 8/9 of the steps; the square of
        what is left.
    base_lr : float
        The highest.
    steps : int
        Updates of the optimizer in the run, `warmup_steps` among them.
    warmup_steps : int, default 0
        Updates in which it rises linearly from 0.

    Raises
    ------
    ValueError
        On this rank: another `kind`, no steps, or no steps after the warm-up.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(SCHEDULES)}")
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"warmup_steps={warmup_steps!r} must be from 0 to below steps={steps!r}: train longer "
            "or warm up shorter"
        )
    options = {"base_lr": base_lr, "warmup_steps": warmup_steps, "warmup_begin_lr": 0.0}
    if kind == "cosine":
        return mx.lr_scheduler.CosineScheduler(steps, final_lr=0.0, **options)
    if kind == "poly":
        return mx.lr_scheduler.PolyScheduler(steps, pwr=2, final_lr=0.0, **options)
    drops = sorted({max(1, round(share * steps)) for share in _DROPS})
    return mx.lr_scheduler.MultiFactorScheduler(drops, factor=0.1, **options)


@dataclass(frozen=True)
class _Terms:
    kind: str
    base_lr: float
    epochs: int
    warmup_epochs: float


class EpochSchedule(mx.lr_scheduler.LRScheduler):
    """`learning_rate_schedule` by epochs: where a run stands, not how many updates it made.

    The same epochs are other numbers of updates where ranks, clients or batches are others: after
    a resume, or where clients come and go. So each epoch says how many it takes. Arguments are
    those of the script also after a resume, so that more epochs can be asked for.

    Parameters
    ----------
    kind : {'cosine', 'step', 'poly'}
    base_lr : float
        The highest rate.
    epochs : int
        Of the run.
    warmup_epochs : float, default 0

    Raises
    ------
    ValueError
        On this rank, from `begin_epoch`: as `learning_rate_schedule`.
    """

    def __init__(self, kind: str, base_lr: float, epochs: int, warmup_epochs: float = 0.0) -> None:
        super().__init__(base_lr)
        self._terms = _Terms(kind, base_lr, epochs, warmup_epochs)  # which no states file holds
        self._updates_ahead = 0
        self._by_updates: Optional[mx.lr_scheduler.LRScheduler] = None

    def begin_epoch(self, done: float, updates: int, num_update: int) -> None:
        """Note where the run stands; on all ranks alike.

        Parameters
        ----------
        done : float
            Epochs that are done, with a fraction where this one goes on inside.
        updates : int
            Of a whole epoch, as the run is shared now.
        num_update : int
            Those that the optimizer has counted: ``trainer.optimizer.num_update``.
        """
        terms = self._terms
        total, warmup = terms.epochs * updates, round(terms.warmup_epochs * updates)
        self._by_updates = learning_rate_schedule(terms.kind, terms.base_lr, total, warmup)
        self._updates_ahead = round(done * updates) - num_update

    def __call__(self, num_update: int) -> float:
        """Return the rate of an update; before the first epoch the one to begin with."""
        if self._by_updates is None:
            return 0.0 if self._terms.warmup_epochs else self._terms.base_lr
        return float(self._by_updates(num_update + self._updates_ahead))
