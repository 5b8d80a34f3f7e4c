"""Files of ``gluon.Trainer.save_states``: pickles, read without letting them name any code.

Whatever class or function a pickle names becomes an `Inert` stand-in that only remembers its name
and what it was given. Arrays and numbers are then made from what the stand-ins of NDArrays and of
numpy's types remember; the optimizer's and the scheduler's attributes are just read off.
"""

from __future__ import annotations

import contextlib
import re
import struct
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import numpy as np

from .pickles import Inert, load
from .record import Scheduler, States
from .values import _ATOMS, Array, CannotSay, Sparse

__all__ = ["read_gluon"]

# How MXNet writes a dense array (src/ndarray/ndarray.cc): magic, storage type, dimensions, each
# dimension; device type and number, type; then the elements. The second magic is of mx.np arrays.
_MAGIC = (0xF993FAC9, 0xF993FACA)
_TYPES = ("f4", "f8", "f2", "u1", "i4", "i1", "i8", "?")
_NUMPY_TYPES = re.compile(r"[?biuf][0-9]{0,2}")
_MOST = 1 << 20  # values in all; few bytes can say that a list holds another one twice, 60 times


def read_gluon(data: bytes, name: str) -> States:
    """Return the states in a pickle: bare ones, or (states, optimizer); runs no code in it.

    Raises
    ------
    ValueError
        Where it is no such pickle; `name` is the file's.
    """
    try:
        found = load(data)
    except Exception as error:  # a pickle can ask for anything
        raise ValueError(
            f"{name} is no states file of gluon_esgd or gluon.Trainer, or was cut short "
            f"({type(error).__name__}: {error})"
        ) from error
    states, optimizer = found, None
    if isinstance(found, tuple) and len(found) == 2:
        states, optimizer = found
    said = isinstance(optimizer, Inert) and isinstance(optimizer.state, dict)
    if not isinstance(states, dict) or not (optimizer is None or said):
        raise ValueError(
            f"{name} is a pickle, but not of optimizer states, as gluon.Trainer.save_states "
            "writes them"
        )
    return _states(states, optimizer, name)


def _states(states: Dict[Any, Any], optimizer: Optional[Inert], name: str) -> States:
    resolve = _Resolver()
    try:
        plain = {key: resolve(state) for key, state in states.items()}
    except (CannotSay, RecursionError) as error:
        raise ValueError(f"{name} has {error} among its states, which is not loaded") from error
    if optimizer is None:
        return States(states=plain)
    attributes, left_out = _attributes(optimizer.state, resolve)
    scheduler = attributes.pop("lr_scheduler", None)
    if "lr_scheduler" in left_out:
        left_out.remove("lr_scheduler")
        scheduler = _scheduler(optimizer.state["lr_scheduler"], resolve)
    return States(
        states=plain,
        optimizer=_path(optimizer)[1],
        attributes=attributes,
        scheduler=scheduler,
        left_out=left_out,
    )


def _attributes(
    state: Dict[Any, Any], resolve: Callable[[Any], Any]
) -> Tuple[Dict[str, Any], List[str]]:
    """What can be said of an object's attributes, and the names of the others."""
    said, left_out = {}, []
    for key, value in state.items():
        try:
            said[key] = resolve(value)
        except (CannotSay, RecursionError):
            left_out.append(key)
    return said, left_out


def _scheduler(value: Any, resolve: Callable[[Any], Any]) -> Scheduler:
    # A function is named by a stand-in itself, an object by what it is an instance of.
    module, name = _path(value)
    state = value.state if isinstance(value, Inert) and isinstance(value.state, dict) else {}
    return {"module": module, "name": name, "attributes": _attributes(state, resolve)[0]}


def _path(value: Any) -> Tuple[str, str]:
    """Module and name of an object's class."""
    if isinstance(value, Inert) and value.path[1] == "_reconstructor" and value.args:
        return getattr(value.args[0], "path", ("", ""))  # of old pickles
    return getattr(value, "path", ("", type(value).__name__))


class _Resolver:
    """Makes the plain value that a pickle meant; so many for one file."""

    def __init__(self) -> None:
        self._left = _MOST

    def __call__(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise CannotSay(f"more than {_MOST} values")
        if type(value) in _ATOMS:
            return value
        if type(value) in (list, tuple):
            return type(value)(self(item) for item in value)
        if type(value) is dict:
            return self._dict(value.items())
        if not isinstance(value, Inert):
            raise CannotSay(f"a {type(value).__name__}")
        module, name = value.path
        said = CannotSay(f"a {'.'.join(filter(None, value.path)):.99}")
        if value.args is None:
            raise said
        if module.startswith("mxnet.") and name.lower().endswith("ndarray"):
            raw = value.state.get("handle") if isinstance(value.state, dict) else None
            return _array(_bytes(raw), "np" if name == "ndarray" else "nd")
        if module.startswith("numpy") and name in ("scalar", "_reconstruct", "_frombuffer"):
            return _numpy(value)
        if (module, name) == ("collections", "OrderedDict"):
            return self._dict(value.items)
        raise said

    def _dict(self, items: Iterable[Any]) -> Dict[Any, Any]:
        pairs = [(self(key), self(item)) for key, item in items]
        if any(type(key) not in _ATOMS for key, _ in pairs):
            raise CannotSay("a dict with keys that are arrays")
        return dict(pairs)


def _bytes(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, Inert) and value.path[1] in ("bytearray", "encode") and value.args:
        inner = value.args[0]
        if not isinstance(inner, str):
            return _bytes(inner)
        with contextlib.suppress(UnicodeEncodeError):
            return inner.encode("latin-1")
    raise CannotSay("an array without its elements")


def _array(raw: bytes, kind: str) -> Any:
    try:
        magic, storage, ndim = struct.unpack_from("<Iii", raw)
        if magic not in _MAGIC:
            raise ValueError("magic")
        if storage in (1, 2):
            return Sparse(raw)
        shape = struct.unpack_from(f"<{ndim}q", raw, 12)
        start = 12 + 8 * ndim + 12
        (code,) = struct.unpack_from("<I", raw, start - 4)
        dtype = np.dtype(_TYPES[code])
        return Array(np.frombuffer(raw, dtype, offset=start).reshape(shape), kind)
    except (struct.error, ValueError, IndexError):
        raise CannotSay("an array in a format that is not known") from None


def _numpy(value: Inert) -> Array:
    try:
        if value.path[1] == "scalar":
            dtype, raw = value.args or ()
            return Array(np.frombuffer(_bytes(raw), _dtype(dtype), 1).reshape(()), "scalar")
        if value.path[1] == "_frombuffer":
            raw, dtype, shape, order = value.args or ()
        else:
            _, shape, dtype, fortran, raw = value.state
            order = "F" if fortran else "C"
        flat = np.frombuffer(_bytes(raw), _dtype(dtype))
        return Array(flat.reshape(shape, order=order), "numpy")
    except (ValueError, TypeError):
        raise CannotSay("an array of numpy's in a form that is not known") from None


def _dtype(value: Any) -> np.dtype:
    if not isinstance(value, Inert) or value.path[1] != "dtype" or not value.args:
        raise CannotSay("an array of numpy's without its type")
    name = str(value.args[0])
    if _NUMPY_TYPES.fullmatch(name) is None:
        raise CannotSay(f"an array of {name:.20}")
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "<"
    return np.dtype(name).newbyteorder(">" if order == ">" else "<")
