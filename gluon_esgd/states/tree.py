"""A tree of plain values as a file: an ``.npz`` of arrays and one JSON text, nothing pickled.

Every array and the text have a checksum of their own (CRC-32, as in any zip archive), which reading
checks.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from typing import IO, Any, Dict, List, Mapping

import numpy as np

from .form import checked_array
from .values import Array

__all__ = ["damaged", "is_tree", "read_tree", "write_tree"]

_FORMAT, _VERSION, _TEXT = "gluon_esgd ", 1, "json"
_ZIP = b"PK\x03\x04"


def write_tree(file: IO[bytes], kind: str, body: Any) -> None:
    """Write the plain value `body` as a file of this `kind`, one word.

    Array by array and without copies; long writes and checksums let other threads run.
    """
    arrays: List[np.ndarray] = []
    said = _say(body, arrays)
    text = json.dumps(
        {"format": _FORMAT + kind, "version": _VERSION, "body": said}, allow_nan=False
    )
    named = {_TEXT: np.array(text), **{f"array{i}": array for i, array in enumerate(arrays)}}
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in named.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                _write_array(entry, np.asarray(array, order="C"))


def _write_array(entry: IO[bytes], array: np.ndarray) -> None:
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(entry, header)
    entry.write(array.reshape(-1).view(np.uint8).data)


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


def is_tree(data: bytes) -> bool:
    """Whether `data` begin as those of `write_tree` do."""
    return data.startswith(_ZIP)


def read_tree(data: bytes, name: str, kind: str) -> Any:
    """Return the plain value in a file's `data`; runs no code that is in them.

    Parameters
    ----------
    data : bytes
    name : str
        The file's, for messages.
    kind : str
        What `write_tree` was told.

    Raises
    ------
    ValueError
        Where it is not of this kind, or damaged.
    """
    try:
        _check_sizes(data)
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {entry: archive[entry] for entry in archive.files}
            head = json.loads(str(arrays.get(_TEXT, "null")))
    except Exception as error:  # whatever reading does with bytes that are not as they were
        raise damaged(name, error) from error
    if not isinstance(head, dict) or head.get("format") != _FORMAT + kind:
        raise ValueError(f"{name} is a zip archive, but no {kind} file")
    if head.get("version") != _VERSION:
        raise ValueError(
            f"{name} is a {kind} file of version {head.get('version')!r}; this gluon_esgd reads "
            f"version {_VERSION}"
        )
    try:
        return _hear(head["body"], arrays)
    except Exception as error:
        raise damaged(name, error) from error


def damaged(name: str, error: Exception) -> ValueError:
    """Return the error to raise where `error` came from what is in the file `name`."""
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
