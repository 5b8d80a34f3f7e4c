"""How a training goes: a progress bar on one rank, and TensorBoard curves of each client."""

from __future__ import annotations

from .curves import read_curves
from .log import TrainingLog

__all__ = ["TrainingLog", "read_curves"]
