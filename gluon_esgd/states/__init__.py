"""What an optimizer remembers, out of it, into it, and as bytes: arrays and JSON, never code."""

from __future__ import annotations

from .files import decode, encode
from .record import Position, States, apply, check, collect
from .values import Array

__all__ = ["Array", "Position", "States", "apply", "check", "collect", "decode", "encode"]
