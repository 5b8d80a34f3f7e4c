"""What the parts of a states file must be, so that nothing that was loaded fails steps later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

import numpy as np

from .values import _ATOMS, _NUMBERS, Array

if TYPE_CHECKING:
    from .record import States

__all__ = ["check_attributes", "check_form", "checked_array"]

_MXNET_TYPES = {np.dtype(t) for t in ("f4", "f8", "f2", "u1", "i4", "i1", "i8", "?")}
_COUNTS = "_all_index_update_counts"


def checked_array(host: np.ndarray, kind: Any) -> Array:
    """Return an array of a file, or raise ValueError where it is none that we write."""
    mxnets = kind in ("nd", "np") and host.dtype in _MXNET_TYPES
    if not mxnets and not (kind in ("numpy", "scalar") and host.dtype.kind in _NUMBERS):
        raise ValueError(f"an array of kind {kind!r:.20} and type {host.dtype!s:.20}")
    if kind == "scalar" and host.shape:
        raise ValueError(f"a scalar of shape {host.shape}")
    return Array(host, kind)


def check_form(states: States) -> None:
    """Raise ValueError, naming the part, unless each part of `states` is of its type."""
    _need(isinstance(states.states, dict), "states", states.states)
    _need(states.optimizer is None or type(states.optimizer) is str, "optimizer", states.optimizer)
    _need(_is_named(states.attributes), "attributes", states.attributes)
    if states.scheduler is not None:
        _check_scheduler(states.scheduler)
    _need(_is_list(states.left_out, str), "left_out", states.left_out)
    shapes = [] if states.shapes is None else states.shapes
    plain = isinstance(shapes, list) and all(_is_list(shape, int) for shape in shapes)
    _need(plain, "shapes", shapes)
    if states.scaler is not None:
        numbers = _is_named(states.scaler) and all(map(_is_number, states.scaler.values()))
        _need(numbers and len(states.scaler) == 3, "scaler", states.scaler)
    if states.position is not None:
        _check_position(vars(states.position))


def _check_scheduler(scheduler: Any) -> None:
    said = isinstance(scheduler, dict) and set(scheduler) == {"module", "name", "attributes"}
    _need(said, "scheduler", scheduler)
    for part in ("module", "name"):
        _need(isinstance(scheduler[part], str), f"scheduler's {part}", scheduler[part])
    _need(_is_named(scheduler["attributes"]), "scheduler's attributes", scheduler["attributes"])


def _check_position(position: Mapping[str, Any]) -> None:
    for name in ("step", "last_due"):
        _need(type(position[name]) is int and position[name] >= 0, name, position[name])
    for name in ("center", "base"):
        value = position[name]
        flat = isinstance(value, Array) and value.host.dtype == np.float32 and value.host.ndim == 1
        _need(value is None or flat, name, value)


def check_attributes(attributes: Mapping[str, Any], optimizer: Any, name: str) -> None:
    """Raise ValueError where an attribute of the file `name` is no value for `optimizer`.

    A number may stand for None and the other way round; what the optimizer does not have yet may
    be anything but in place of its methods.
    """
    for key, value in attributes.items():
        own = vars(optimizer).get(key)
        wrong = own is not None and value is not None and _kind(own) != _kind(value)
        if wrong or not isinstance(key, str) or callable(getattr(type(optimizer), key, None)):
            raise ValueError(
                f"{name} has an attribute {key!r:.60} of {value!r:.60}, which is none of the "
                f"trainer's {type(optimizer).__name__}: it is damaged"
            )
    rows = attributes.get(_COUNTS, {})
    for row in rows.values() if isinstance(rows, dict) else [None]:
        if not isinstance(row, dict) or not all(type(n) is int for n in [*row, *row.values()]):
            raise ValueError(f"{name} has update counts that are none: {row!r:.60}; it is damaged")


def _kind(value: Any) -> str:
    """Numbers are of one kind, whatever holds them."""
    if _is_number(value) or isinstance(value, np.generic):
        return "number"
    if isinstance(value, Array) and value.kind == "scalar":
        return "number"
    return type(value).__name__ if type(value) in (*_ATOMS, list, tuple, dict) else "other"


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float)


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(type(key) is str for key in value)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _need(holds: bool, name: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r:.60}")
