"""The rows of docs/compatibility.md, one file for each theme, in the order of the table."""

from __future__ import annotations

from ..registry import BEHAVIOURS
from . import making, optimizers, stepping, freezing, changing, networks, stores  # noqa: F401, I001

__all__ = ["BEHAVIOURS"]
