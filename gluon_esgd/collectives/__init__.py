"""Allreduce over all vectors of a client as one object: numpy arrays in, in place, no MXNet."""

from __future__ import annotations

from .agreement import agree
from .buckets import Span, pack_order
from .registry import allreduce, names, register

__all__ = ["Span", "agree", "allreduce", "names", "pack_order", "register"]
