"""Files of ``gluon.Trainer.save_states``: pickles, read without letting them name any code.

Whatever class or function a pickle names becomes an `_Inert` stand-in that only remembers its name
and what it was given. Arrays and numbers are then made from what the stand-ins of NDArrays and of
numpy's types remember; the optimizer's and the scheduler's attributes are just read off.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from .record import Scheduler, States
from .values import _ATOMS, _NUMBERS, Array, CannotSay, Sparse

__all__ = ["read_gluon"]

# How MXNet writes a dense array (src/ndarray/ndarray.cc): magic, storage type, dimensions, each
# dimension; device type and number, type; then the elements. The second magic is of mx.np arrays.
_MAGIC = (0xF993FAC9, 0xF993FACA)
_TYPES = ("f4", "f8", "f2", "u1", "i4", "i1", "i8", "?")


class _Inert:
    """In place of what a pickle names: keeps what it is given, does nothing."""

    path = ("", "")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self.args, self.state, self.items = args, None, []
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    args: Tuple[Any, ...]
    state: Any
    items: List[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type("Inert", (_Inert,), {"path": (module, name)})


def read_gluon(data: bytes, name: str) -> States:
    """Return the states in a pickle: bare ones, or (states, optimizer); runs no code in it.

    Raises
    ------
    ValueError
        Where it is no such pickle; `name` is the file's.
    """
    try:
        found = _Reader(io.BytesIO(data)).load()
    except Exception as error:  # a pickle can ask for anything
        raise ValueError(
            f"{name} is no states file of gluon_esgd or gluon.Trainer, or was cut short "
            f"({type(error).__name__}: {error})"
        ) from error
    states, optimizer = found, None
    if isinstance(found, tuple) and len(found) == 2:
        states, optimizer = found
    said = isinstance(optimizer, _Inert) and isinstance(optimizer.state, dict)
    if not isinstance(states, dict) or not (optimizer is None or said):
        raise ValueError(
            f"{name} is a pickle, but not of optimizer states, as gluon.Trainer.save_states "
            "writes them"
        )
    return _states(states, optimizer, name)


def _states(states: Dict[Any, Any], optimizer: Optional[_Inert], name: str) -> States:
    try:
        plain = {key: _resolve(state) for key, state in states.items()}
    except (CannotSay, RecursionError) as error:
        raise ValueError(f"{name} has {error} among its states, which is not loaded") from error
    if optimizer is None:
        return States(states=plain)
    attributes, left_out = _attributes(optimizer.state)
    scheduler = attributes.pop("lr_scheduler", None)
    if "lr_scheduler" in left_out:
        left_out.remove("lr_scheduler")
        scheduler = _scheduler(optimizer.state["lr_scheduler"])
    return States(
        states=plain,
        optimizer=_path(optimizer)[1],
        attributes=attributes,
        scheduler=scheduler,
        left_out=left_out,
    )


def _attributes(state: Dict[str, Any]) -> Tuple[Dict[str, Any], List[str]]:
    """What can be said of an object's attributes, and the names of the others."""
    said, left_out = {}, []
    for key, value in state.items():
        try:
            said[key] = _resolve(value)
        except (CannotSay, RecursionError):
            left_out.append(key)
    return said, left_out


def _scheduler(value: Any) -> Scheduler:
    # A function is named by a stand-in itself, an object by what it is an instance of.
    module, name = _path(value)
    state = value.state if isinstance(value, _Inert) and isinstance(value.state, dict) else {}
    return {"module": module, "name": name, "attributes": _attributes(state)[0]}


def _path(value: Any) -> Tuple[str, str]:
    """Module and name of an object's class."""
    if isinstance(value, _Inert) and value.path[1] == "_reconstructor" and value.args:
        return getattr(value.args[0], "path", ("", ""))  # of old pickles
    return getattr(value, "path", ("", type(value).__name__))


def _resolve(value: Any) -> Any:
    """The plain value that a pickle meant."""
    if type(value) in _ATOMS:
        return value
    if type(value) in (list, tuple):
        return type(value)(_resolve(item) for item in value)
    if type(value) is dict:
        return {_resolve(key): _resolve(item) for key, item in value.items()}
    if not isinstance(value, _Inert):
        raise CannotSay(f"a {type(value).__name__}")
    module, name = value.path
    if module.startswith("mxnet.") and name.lower().endswith("ndarray"):
        raw = value.state.get("handle") if isinstance(value.state, dict) else None
        return _array(_bytes(raw), "np" if name == "ndarray" else "nd")
    if module.startswith("numpy") and name in ("scalar", "_reconstruct", "_frombuffer"):
        return _numpy(value)
    if (module, name) == ("collections", "OrderedDict"):
        return {_resolve(key): _resolve(item) for key, item in value.items}
    raise CannotSay(f"a {module}.{name}")


def _bytes(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, _Inert) and value.path[1] in ("bytearray", "encode") and value.args:
        inner = value.args[0]
        return inner.encode("latin-1") if isinstance(inner, str) else _bytes(inner)
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
        dtype = np.dtype(_TYPES[struct.unpack_from("<i", raw, start - 4)[0]])
        return Array(np.frombuffer(raw, dtype, offset=start).reshape(shape), kind)
    except (struct.error, ValueError, IndexError):
        raise CannotSay("an array in a format that is not known") from None


def _numpy(value: _Inert) -> Array:
    try:
        if value.path[1] == "scalar":
            dtype, raw = value.args
            return Array(np.frombuffer(_bytes(raw), _dtype(dtype), 1).reshape(()), "scalar")
        if value.path[1] == "_frombuffer":
            raw, dtype, shape, order = value.args
        else:
            _, shape, dtype, fortran, raw = value.state
            order = "F" if fortran else "C"
        flat = np.frombuffer(_bytes(raw), _dtype(dtype))
        return Array(flat.reshape(shape, order=order), "numpy")
    except (ValueError, TypeError):
        raise CannotSay("an array of numpy's in a form that is not known") from None


def _dtype(value: Any) -> np.dtype:
    if not isinstance(value, _Inert) or value.path[1] != "dtype":
        raise CannotSay("an array of numpy's without its type")
    dtype = np.dtype(str(value.args[0]))
    if dtype.kind not in _NUMBERS:
        raise CannotSay(f"an array of {dtype}")
    return dtype.newbyteorder(value.state[1]) if value.state else dtype
