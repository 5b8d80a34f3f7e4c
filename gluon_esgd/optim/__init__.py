"""The rules between clients, `ElasticSGD`, and what has to be known of MXNet's optimizers."""

from __future__ import annotations

from .decay import no_weight_decay
from .devices import keep_alike
from .elastic import (
    DEFAULT_BETA,
    check_alpha,
    default_alpha,
    elastic_difference,
    largest_alpha,
    weight_change,
)
from .elastic_sgd import ElasticSGD, is_nesterov
from .limits import check_optimizer, weight_copies
from .masters import Masters
from .outer import Outer, check_outer, largest_outer_alpha, outer_update
from .schedules import SCHEDULES, EpochSchedule, learning_rate_schedule

__all__ = [
    "DEFAULT_BETA",
    "SCHEDULES",
    "ElasticSGD",
    "EpochSchedule",
    "Masters",
    "Outer",
    "check_alpha",
    "check_optimizer",
    "check_outer",
    "default_alpha",
    "elastic_difference",
    "is_nesterov",
    "keep_alike",
    "largest_alpha",
    "largest_outer_alpha",
    "learning_rate_schedule",
    "no_weight_decay",
    "outer_update",
    "weight_change",
    "weight_copies",
]
