"""How a training goes: a progress bar on one rank, and TensorBoard curves of each client."""

from __future__ import annotations

from .log import TrainingLog

__all__ = ["TrainingLog"]
