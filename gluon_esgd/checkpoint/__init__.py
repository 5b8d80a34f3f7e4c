"""The whole state of a training in files, a loop that goes on from them, and exports."""

from __future__ import annotations

from .going_on import go_on
from .inference import BestExport, export
from .state import TrainingState

__all__ = ["BestExport", "TrainingState", "export", "go_on"]
