"""How a trainer comes to its rule, interval, moving rate and delay.

Precedence: keyword argument, launcher, `ElasticSGD`, kvstore string, default.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Union

from .optim import check_alpha, default_alpha
from .settings import RULES, Settings

__all__ = ["Policy", "resolve"]

_log = logging.getLogger(__name__)

_DEFAULT_INTERVAL = {"sgd": 1, "asgd": 1, "esgd": 64}

# They rebuild the weight from other state, which an exchange would have to move too.
_REBUILD = ("ftrl", "ftml")


@dataclass(frozen=True)
class Policy:
    """What a trainer does between clients; see `resolve`."""

    rule: str
    interval: Union[int, Callable[[int], int]]
    alpha: float
    lazy: int

    @property
    def has_center(self) -> bool:
        """Whether there is a center that clients move."""
        return self.rule != "sgd"


def resolve(
    settings: Settings,
    optimizer: Any,
    kvstore: Any,
    *,
    rule: Optional[str] = None,
    interval: Union[int, Callable[[int], int], None] = None,
    alpha: Optional[float] = None,
    beta: Optional[float] = None,
    lazy: Optional[int] = None,
) -> Policy:
    """Find and check what holds for a trainer.

    Parameters
    ----------
    settings : Settings
        The launcher's flags and the shape of the job.
    optimizer : Optimizer
        May carry interval and alpha or beta (`ElasticSGD`).
    kvstore : object
        As given to the trainer; a string with ``dist`` in it says a rule.
    rule, interval, alpha, beta, lazy
        The trainer's keyword arguments, None where not given.

    Raises
    ------
    ValueError
        Naming the argument, its value and what is allowed.
    """
    if rule is not None and rule not in RULES:
        raise ValueError(f"rule={rule!r} must be one of {', '.join(RULES)}, or unset")
    default = "sgd" if settings.num_clients == 1 else "esgd"
    rule = rule or settings.rule or _rule_of(kvstore) or default
    if rule != "sgd" and settings.num_servers == 0:
        if settings.num_clients == 1:
            _log.warning("rule %r with one client and no server has no center: using 'sgd'", rule)
            rule = "sgd"
        else:
            raise ValueError(
                f"{settings.num_clients} clients need a server: start with --servers 1 or more"
            )
    length = _interval(rule, interval, settings, optimizer)
    _check_optimizer(rule, optimizer)
    rate = _alpha(alpha, beta, settings, optimizer)
    return Policy(rule, length, rate, _lazy(lazy, settings, length))


def _rule_of(kvstore: Any) -> Optional[str]:
    if not isinstance(kvstore, str) or "dist" not in kvstore:
        return None
    return "asgd" if "async" in kvstore else "sgd"


def _first(*candidates: Any) -> Any:
    return next((c for c in candidates if c is not None), None)


def _interval(
    rule: str, given: Union[int, Callable[[int], int], None], settings: Settings, optimizer: Any
) -> Union[int, Callable[[int], int]]:
    if given is not None and not callable(given) and (given != int(given) or given < 1):
        raise ValueError(
            f"interval={given!r} must be an integer of at least 1 or a callable of the step"
        )
    if rule == "sgd":
        return 1
    carried = getattr(optimizer, "interval", None)
    return _first(given, settings.interval, carried, _DEFAULT_INTERVAL[rule])


def _alpha(
    alpha: Optional[float], beta: Optional[float], settings: Settings, optimizer: Any
) -> float:
    levels: List[tuple] = [
        (alpha, beta),
        (settings.alpha, settings.beta),
        (getattr(optimizer, "alpha", None), getattr(optimizer, "beta", None)),
    ]
    clients = settings.num_clients
    for a, b in levels:
        if a is not None and b is not None:
            raise ValueError(f"give alpha={a!r} or beta={b!r}, not both")
        if a is not None:
            return check_alpha(a, clients)
        if b is not None:
            return check_alpha(default_alpha(clients, b), clients)
    return default_alpha(clients)


def _lazy(
    given: Optional[int], settings: Settings, interval: Union[int, Callable[[int], int]]
) -> int:
    lazy = _first(given, settings.lazy, 1)
    if lazy != int(lazy) or lazy < 0:
        raise ValueError(f"lazy={lazy!r} must be an integer of at least 0 (steps)")
    if not callable(interval) and lazy > interval:
        raise ValueError(
            f"lazy={lazy} must not be above interval={interval}: an exchange is applied before "
            "the next one starts"
        )
    return int(lazy)


def _check_optimizer(rule: str, optimizer: Any) -> None:
    name = type(optimizer).__name__.lower()
    if rule != "sgd" and name in _REBUILD:
        raise ValueError(
            f"optimizer {name!r} computes its weights anew from its own state, so an exchange "
            f"under rule={rule!r} would be lost at the next step; use rule='sgd' or another "
            "optimizer"
        )
