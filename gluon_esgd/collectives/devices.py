"""Where an array lies."""

from __future__ import annotations

from typing import Any

__all__ = ["is_on_device"]


def is_on_device(array: Any) -> bool:
    """Whether `array` lies on a GPU (a CuPy array, say)."""
    return hasattr(array, "__cuda_array_interface__")
