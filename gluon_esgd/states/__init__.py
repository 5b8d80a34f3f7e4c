"""What an optimizer remembers, out of it, into it, and as bytes: arrays and JSON, never code."""

from __future__ import annotations

from .files import as_states, as_tree, decode, encode
from .record import Position, States, apply, check, collect
from .tree import damaged, read_tree, write_tree
from .values import Array, live

__all__ = [
    "Array",
    "Position",
    "States",
    "apply",
    "as_states",
    "as_tree",
    "check",
    "collect",
    "damaged",
    "decode",
    "encode",
    "live",
    "read_tree",
    "write_tree",
]
