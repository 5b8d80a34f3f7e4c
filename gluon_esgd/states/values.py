"""Values that a states file can hold: numbers, texts, arrays, and lists, tuples and dicts of them.

A *plain* value has arrays as `Array`, in host memory; a *live* one has them as MXNet or numpy
arrays where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np

__all__ = ["Array", "CannotSay", "Sparse", "live", "plain", "plain_items", "shapes"]

_ATOMS = (type(None), bool, int, float, str)
_NUMBERS = "biuf"  # of dtypes: bool, int, unsigned, float


class CannotSay(TypeError):
    """A value is of a kind that a states file does not hold; the text says which."""


class Array(NamedTuple):
    """An array, and what it is when it lives.

    Attributes
    ----------
    host : ndarray
    kind : {'nd', 'np', 'numpy', 'scalar'}
        ``mx.nd``, ``mx.np``, numpy's own, or a scalar of numpy's.
    """

    host: np.ndarray
    kind: str


@dataclass(frozen=True)
class Sparse:
    """A sparse NDArray in the bytes that MXNet gave it; only in files of ``gluon.Trainer``."""

    raw: bytes


def plain(value: Any) -> Any:
    """Return the live `value` with its arrays copied to host memory; waits for them.

    Raises
    ------
    CannotSay
        Where there is something else in it.
    """
    if type(value) in _ATOMS:
        return value
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if isinstance(value, dict):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, mx.nd.NDArray) and value.stype == "default":
        kind = "np" if isinstance(value, mx.np.ndarray) else "nd"
        return Array(_numbers(value.asnumpy()), kind)
    if isinstance(value, np.generic):
        return Array(_numbers(np.asarray(value)), "scalar")
    if type(value) is np.ndarray:
        return Array(_numbers(value.copy()), "numpy")
    raise CannotSay(f"a {type(value).__name__}")


def plain_items(items: Mapping[str, Any]) -> Dict[str, Any]:
    """Return those of `items` that can be said, plain."""
    out = {}
    for name, value in items.items():
        try:
            out[name] = plain(value)
        except CannotSay:
            continue
    return out


def _key(key: Any) -> Any:
    if type(key) not in _ATOMS:
        raise CannotSay(f"a dict with a key that is a {type(key).__name__}")
    return key


def _numbers(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in _NUMBERS:
        raise CannotSay(f"an array of {array.dtype}")
    return array


def live(value: Any, ctx: mx.Context) -> Any:
    """Return the plain `value` with arrays of its own, MXNet's on `ctx`."""
    if isinstance(value, Array):
        return _live_array(value, ctx)
    if isinstance(value, Sparse):
        array = mx.nd.NDArray(None)
        array.__setstate__({"handle": bytearray(value.raw)})
        return array
    if isinstance(value, (list, tuple)):
        return type(value)(live(item, ctx) for item in value)
    if isinstance(value, dict):
        return {key: live(item, ctx) for key, item in value.items()}
    return value


def _live_array(array: Array, ctx: mx.Context) -> Any:
    if array.kind == "scalar":
        return array.host[()]
    if array.kind == "numpy":
        return array.host.copy()
    if array.kind == "np":
        with mx.util.np_shape(True):  # for a shape with nothing in it
            return mx.np.array(array.host, dtype=array.host.dtype, ctx=ctx)
    return mx.nd.array(array.host, dtype=array.host.dtype, ctx=ctx)


def shapes(value: Any, path: Tuple[Any, ...] = ()) -> Dict[Tuple[Any, ...], Tuple[int, ...]]:
    """Return the shape of each MXNet array in `value`, live or plain, by its place in it."""
    own: Optional[Tuple[int, ...]] = None
    if isinstance(value, Array):
        own = value.host.shape if value.kind in ("nd", "np") else None
    elif isinstance(value, (mx.nd.NDArray, Sparse)):
        own = live(value, mx.cpu()).shape
    if own is not None:
        return {path: own}
    if isinstance(value, dict):
        inside = list(value.items())
    else:
        inside = list(enumerate(value)) if isinstance(value, (list, tuple)) else []
    return {k: v for key, item in inside for k, v in shapes(item, (*path, key)).items()}
