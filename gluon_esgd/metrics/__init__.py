"""Averages of the user's own numbers: one value for all ranks of a client, or for the job."""

from __future__ import annotations

from .average import metric_average
from .clients import share_with_main
from .joining import OverRanks, evaluate, over_ranks

__all__ = ["OverRanks", "evaluate", "metric_average", "over_ranks", "share_with_main"]
