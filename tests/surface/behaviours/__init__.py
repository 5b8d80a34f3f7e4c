"""The rows of docs/compatibility.md: one file for each theme, in the order of the table."""

from __future__ import annotations

from importlib import import_module

from ..registry import BEHAVIOURS

__all__ = ["BEHAVIOURS"]

_THEMES = (
    "making",
    "optimizers",
    "refused_optimizers",
    "stepping",
    "gradients",
    "freezing",
    "changing",
    "networks",
    "stores",
    "remembering",
    "contrib",
)
for _name in _THEMES:
    import_module(f"{__name__}.{_name}")
