"""Collectives over all vectors of a client as one object: arrays in, in place, no MXNet."""

from __future__ import annotations

from .agreement import agree
from .buckets import Span, pack_order
from .calls import allgather, allreduce, broadcast, reduce_scatter
from .memory import shared_array
from .operations import TAIL, divide_by_weight
from .parts import part
from .plan import Plan, plan
from .registry import names, register

__all__ = [
    "TAIL",
    "Plan",
    "Span",
    "agree",
    "allgather",
    "allreduce",
    "broadcast",
    "divide_by_weight",
    "names",
    "pack_order",
    "part",
    "plan",
    "reduce_scatter",
    "register",
    "shared_array",
]
