"""The whole state of a training in files, and a loop that goes on from them."""

from __future__ import annotations

from .state import TrainingState

__all__ = ["TrainingState"]
