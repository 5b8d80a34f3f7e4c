"""What a script gives to a `TrainingState`, checked."""

from __future__ import annotations

import os
from typing import Any, Optional, Tuple

__all__ = ["checked_count", "checked_every", "checked_folder"]


def checked_count(name: str, value: Any, low: int = 1) -> int:
    """Return `value` where it is an integer of at least `low`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} must be an integer")
    if value < low:
        raise ValueError(f"{name}={value!r} must be at least {low}")
    return int(value)


def checked_every(steps: Any, seconds: Any) -> Tuple[Optional[int], Optional[float]]:
    """Return how often to save inside an epoch."""
    steps = None if steps is None else checked_count("every_steps", steps)
    if seconds is not None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"every_s={seconds!r} must be a number of seconds")
        if not seconds > 0:
            raise ValueError(f"every_s={seconds!r} must be above 0")
    return steps, seconds


def checked_folder(folder: Any, job_dir: Optional[str]) -> str:
    """Return the folder of all clients' checkpoints as an absolute path."""
    if folder is None and job_dir is None:
        raise ValueError(
            "folder=None: this job was not started by `gluon-esgd run`, so it has no folder of its "
            "own; say where checkpoints go, folder='checkpoints'"
        )
    if folder is None:
        folder = os.path.join(str(job_dir), "checkpoints")
    return os.path.abspath(os.fspath(folder))
