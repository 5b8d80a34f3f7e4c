"""The learning rates of usual recipes, from MXNet's own schedulers."""

from __future__ import annotations

import mxnet as mx

__all__ = ["SCHEDULES", "learning_rate_schedule"]

SCHEDULES = ("cosine", "step", "poly")

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
