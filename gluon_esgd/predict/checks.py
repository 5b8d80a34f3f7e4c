"""Checks of fields: each adds a sentence to the faults of a dataclass."""

from __future__ import annotations

import math
from typing import Any, List, Optional

__all__ = ["number", "whole"]


def whole(faults: List[str], name: str, value: Any, least: int) -> None:
    """Take an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        faults.append(f"{name} {value!r} must be an integer of at least {least}")


def number(
    faults: List[str],
    name: str,
    value: Any,
    least: Optional[float] = None,
    most: float = math.inf,
) -> None:
    """Take a finite number above 0, or of at least `least` where that is given."""
    what = "above 0" if least is None else f"of at least {least:g}"
    what = what if most == math.inf else f"{what}, {most:g} at most"
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value > most or (value <= 0 if least is None else value < least):
        faults.append(f"{name} {value!r} must be a number {what}")
