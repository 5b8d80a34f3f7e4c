"""The rules between clients, and the optimizer that carries their settings."""

from __future__ import annotations

from .elastic import check_alpha, default_alpha, elastic_difference, largest_alpha, weight_change
from .elastic_sgd import ElasticSGD, is_nesterov
from .masters import master_weight
from .outer import Outer, check_outer, largest_outer_alpha, outer_update

__all__ = [
    "ElasticSGD",
    "Outer",
    "check_alpha",
    "check_outer",
    "default_alpha",
    "elastic_difference",
    "is_nesterov",
    "largest_alpha",
    "largest_outer_alpha",
    "master_weight",
    "outer_update",
    "weight_change",
]
