"""How a trainer comes to its rule, interval, moving rate, delay, outer momentum, compression.

Precedence: keyword argument, launcher, `ElasticSGD`, kvstore string, default.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Union

import numpy as np

from .center.contract import LIMIT, checksum
from .optim import DEFAULT_BETA, ElasticSGD, Outer, check_alpha, check_outer, default_alpha
from .settings import RULES, Settings

__all__ = ["HALF_FLOATS", "Interval", "IntervalLike", "Policy", "resolve"]

_log = logging.getLogger(__name__)

_DEFAULT_INTERVAL = {"sgd": 1, "asgd": 1, "esgd": 64}

HALF_FLOATS = {"type": "fp16"}  # the compression_params that there are

IntervalLike = Union[int, Callable[[int], int], None]


class Interval:
    """When exchanges are due: every `value` steps, or as a function of the step says.

    Parameters
    ----------
    value : int or callable
        With a callable, the exchange after one at step ``s`` is due at the
        first step ``t`` with ``t - s >= value(t)``.
    """

    def __init__(self, value: Union[int, Callable[[int], int]]) -> None:
        self._value = value
        self.last = 0  # the step at which one was due last

    def due(self, step: int) -> bool:
        """Whether an exchange is due after update `step`, counted from 1; asked once a step."""
        length = self._value(step) if callable(self._value) else self._value
        if not isinstance(length, (int, np.integer)) or length < 1:
            raise ValueError(f"interval at step {step} is {length!r}: it must be an integer >= 1")
        if step - self.last < length:
            return False
        self.last = step
        return True


@dataclass(frozen=True)
class Policy:
    """What a trainer does between clients; see `resolve`."""

    rule: str
    interval: Union[int, Callable[[int], int]]
    alpha: float
    lazy: int
    outer: Outer = field(default_factory=Outer)
    compression: Optional[str] = None
    beta: Optional[float] = None  # from which alpha came; None where alpha itself was given

    def alpha_for(self, num_clients: int) -> float:
        """Return the moving rate where the job has come to have `num_clients` clients."""
        return self.alpha if self.beta is None else default_alpha(num_clients, self.beta)

    @property
    def has_center(self) -> bool:
        """Whether there is a center that clients move."""
        return self.rule != "sgd"

    def contract(self) -> Dict[str, int]:
        """Return what all clients must have alike, as numbers that travel between them."""
        return {
            "outer (checksum)": checksum(repr(self.outer)),
            "compression (none 0, fp16 1)": int(self.compression is not None),
        }

    def terms(self) -> Dict[str, int]:
        """Return what clients that exchange together must have alike, for their contract."""
        interval = 0 if callable(self.interval) else min(self.interval, LIMIT - 1)
        return {"interval (0: a function)": interval, "alpha (millionths)": round(1e6 * self.alpha)}


def resolve(
    settings: Settings,
    optimizer: Any,
    kvstore: Any,
    *,
    rule: Optional[str] = None,
    interval: IntervalLike = None,
    alpha: Optional[float] = None,
    beta: Optional[float] = None,
    lazy: Optional[int] = None,
    outer: Optional[Mapping[str, float]] = None,
    compression_params: Optional[Mapping[str, Any]] = None,
    aloud: bool = True,
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
    rule, interval, alpha, beta, lazy, outer, compression_params
        The trainer's keyword arguments, None where not given.
    aloud : bool, default True
        Whether what is taken otherwise than meant is logged: by one rank of a job.

    Raises
    ------
    ValueError
        Naming the argument, its value and what is allowed.
    """
    if rule is not None and rule not in RULES:
        raise ValueError(f"rule={rule!r} must be one of {', '.join(RULES)}, or unset")
    default = "sgd" if settings.num_clients == 1 else "esgd"
    rule = rule or settings.rule or _rule_of(kvstore) or default
    _check_servers(rule, settings)
    if rule != "sgd" and settings.num_servers == 0 and settings.num_clients == 1:
        if aloud:
            _log.warning("rule %r with one client and no server has no center: using 'sgd'", rule)
        rule = "sgd"
    carrier = optimizer if isinstance(optimizer, ElasticSGD) else None
    length = _interval(interval, settings, carrier)
    moving_rate, beta = _alpha(alpha, beta, settings, carrier)
    center = _outer(outer, rule)
    if rule == "esgd":
        check_outer(center, moving_rate, settings.num_clients, one_step=settings.is_split)
    return Policy(
        rule=rule,
        interval=1 if rule == "sgd" else _first(length, _DEFAULT_INTERVAL[rule]),
        alpha=moving_rate,
        lazy=_lazy(lazy, settings, length, rule),
        outer=center,
        compression=_compression(compression_params, settings),
        beta=beta,
    )


def _check_servers(rule: str, settings: Settings) -> None:
    clients = settings.num_clients
    if settings.is_split and rule == "asgd":
        raise ValueError(
            f"rule='asgd' is asynchronous, which needs a server, and the {clients} clients of "
            "this MPI job have none: start with `gluon-esgd run --servers 1`, or use rule='esgd' "
            "or 'sgd'"
        )
    if settings.num_servers == 0 and clients > 1 and not settings.is_split:
        raise ValueError(f"{clients} clients need a server: start with --servers 1 or more")


def _rule_of(kvstore: Any) -> Optional[str]:
    if not isinstance(kvstore, str) or "dist" not in kvstore:
        return None
    return "asgd" if "async" in kvstore else "sgd"


def _first(*candidates: Any) -> Any:
    return next((c for c in candidates if c is not None), None)


def _whole(name: str, value: Any, least: int, unit: str) -> int:
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = least - 1
    if whole < least or whole != value:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least} ({unit})")
    return whole


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} must be a number") from None


def _interval(
    given: IntervalLike, settings: Settings, carrier: Optional[ElasticSGD]
) -> IntervalLike:
    """The interval that somebody has said, if anybody."""
    said = _first(given, settings.interval, carrier and carrier.interval)
    if said is None or callable(said):
        return said
    return _whole("interval", said, 1, "steps, or a function of the step")


def _alpha(
    alpha: Optional[float],
    beta: Optional[float],
    settings: Settings,
    carrier: Optional[ElasticSGD],
) -> Tuple[float, Optional[float]]:
    """Alpha, and the beta from which it comes unless it was given itself."""
    levels = [(alpha, beta), (settings.alpha, settings.beta)]
    if carrier is not None:
        levels.append((carrier.alpha, carrier.beta))
    clients = settings.num_clients
    for a, b in levels:
        if a is not None and b is not None:
            raise ValueError(f"give alpha={a!r} or beta={b!r}, not both")
        if a is not None:
            return check_alpha(_number("alpha", a), clients), None
        if b is not None:
            beta = _number("beta", b)
            return check_alpha(default_alpha(clients, beta), clients), beta
    return default_alpha(clients), DEFAULT_BETA


def _lazy(given: Optional[int], settings: Settings, interval: IntervalLike, rule: str) -> int:
    lazy = _whole("lazy", _first(given, settings.lazy, 1), 0, "steps")
    if interval is None and rule != "sgd":
        interval = _DEFAULT_INTERVAL[rule]
    if isinstance(interval, int) and lazy > interval:
        raise ValueError(
            f"lazy={lazy} must not be above interval={interval}: an exchange is applied before "
            "the next one starts"
        )
    return lazy


def _outer(given: Optional[Mapping[str, float]], rule: str) -> Outer:
    if given is None:
        return Outer()
    known = [f.name for f in fields(Outer)]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise ValueError(f"outer={given!r} must be a dict with {' and '.join(known)}, or unset")
    if rule == "sgd":
        raise ValueError(
            f"outer={given!r} under rule='sgd': there is no center to move; use rule='esgd' or "
            "'asgd' with a server, or leave outer unset"
        )
    return Outer(**{name: _number(f"outer {name}", value) for name, value in given.items()})


def _compression(given: Optional[Mapping[str, Any]], settings: Settings) -> Optional[str]:
    if not given:
        return settings.compression
    if given != HALF_FLOATS:
        raise ValueError(
            f"compression_params={given!r} is not offered in a distributed job, where ranks take "
            "exact means and clients send changes of weights, which fit no threshold; use "
            f"{HALF_FLOATS}, or leave it unset"
        )
    return "fp16"
