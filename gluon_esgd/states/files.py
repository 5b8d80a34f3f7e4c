"""States as bytes: our own format, an ``.npz`` of arrays and one JSON text, and Gluon's."""

from __future__ import annotations

import io
import json
import math
import zipfile
from typing import Any, Dict, List, Mapping

import numpy as np

from .form import check_form, checked_array
from .gluon_file import read_gluon
from .record import Position, States
from .values import Array

__all__ = ["decode", "encode"]

_FORMAT, _VERSION, _TEXT = "gluon_esgd states", 1, "json"
_ZIP = b"PK\x03\x04"


def encode(states: States) -> bytes:
    """Return `states` as the bytes of a file: numpy's ``.npz``, without anything pickled."""
    arrays: List[np.ndarray] = []
    position = None if states.position is None else vars(states.position)
    body = _say({**vars(states), "position": position}, arrays)
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "body": body}, allow_nan=False)
    named = {_TEXT: np.array(text), **{f"array{i}": array for i, array in enumerate(arrays)}}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, array in named.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    return out.getvalue()


def _say(value: Any, arrays: List[np.ndarray]) -> Any:
    """The plain `value` as what JSON can say; its arrays are put into `arrays`."""
    if isinstance(value, Array):
        arrays.append(value.host)
        return {"array": len(arrays) - 1, "kind": value.kind}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_say(item, arrays) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_say(k, arrays), _say(v, arrays)] for k, v in value.items()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def decode(data: bytes, name: str) -> States:
    """Return the states in a file's `data`, ours or Gluon's; runs no code that is in them.

    Parameters
    ----------
    data : bytes
    name : str
        The file's, for messages.

    Raises
    ------
    ValueError
        Where it is neither, or damaged.
    """
    if not data:
        raise ValueError(f"{name} is empty: it is no states file")
    if not data.startswith(_ZIP):
        return read_gluon(data, name)
    try:
        _check_sizes(data)
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {entry: archive[entry] for entry in archive.files}
            head = json.loads(str(arrays.get(_TEXT, "null")))
    except Exception as error:  # whatever reading does with bytes that are not as they were
        raise _damaged(name, error) from error
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise ValueError(f"{name} is a zip archive, but no states file: save_states writes those")
    if head.get("version") != _VERSION:
        raise ValueError(
            f"{name} is a states file of version {head.get('version')!r}; this gluon_esgd reads "
            f"version {_VERSION}"
        )
    try:
        fields = _hear(head["body"], arrays)
        position = fields.pop("position")
        states = States(**fields, position=None if position is None else Position(**position))
        check_form(states)
        return states
    except Exception as error:
        raise _damaged(name, error) from error


def _damaged(name: str, error: Exception) -> ValueError:
    return ValueError(f"{name} is damaged or was cut short ({type(error).__name__}: {error})")


def _check_sizes(data: bytes) -> None:
    """Raise where entries say that they hold more than the file does: we write them unpacked."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > len(data):
        raise ValueError(f"its entries claim {size} bytes, the file has {len(data)}")


def _hear(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The plain value that `_say` has said."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return checked_array(arrays[f"array{value['array']}"], value["kind"])
    if "float" in value:
        return float(value["float"])
    if "dict" in value:
        out: Dict[Any, Any] = {_hear(k, arrays): _hear(v, arrays) for k, v in value["dict"]}
        return out
    (kind,) = value
    return {"list": list, "tuple": tuple}[kind](_hear(item, arrays) for item in value[kind])
