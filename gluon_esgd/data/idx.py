"""Read IDX files, the format of MNIST and its kin.

MXNet's own ``gluon.data.vision.FashionMNIST`` accepts only files with the
checksums of its own mirror; the same pictures packed by others it would
replace by a download.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from typing import Union

import numpy as np

__all__ = ["read_idx"]

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_DIMENSIONS = 32  # of numpy's arrays
_PIECE = 1 << 20


def _content(path: str) -> bytes:
    """The bytes of the file, unpacked; no more of them than its header asks for, and one."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not packed:
            return file.read()
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                head = unpacked.read(4 + 4 * _MOST_DIMENSIONS)
                return head + _read(unpacked, _length(head) + 1 - len(head))
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path}: broken gzip file ({error}); fetch it again") from error


def _read(file: gzip.GzipFile, left: int) -> bytes:
    """Read so many bytes, piece by piece: a header may promise what no memory holds."""
    pieces = []
    while left > 0:
        pieces.append(file.read(min(left, _PIECE)))
        left -= len(pieces[-1])
        if not pieces[-1]:
            break
    return b"".join(pieces)


def _length(head: bytes) -> int:
    """Bytes of a file that begins with `head`, as far as its dimensions say."""
    if len(head) < 4 or head[2] not in _TYPES or len(head) < 4 + 4 * head[3]:
        return len(head)
    shape = struct.unpack_from(f">{head[3]}I", head, 4)
    return 4 + 4 * head[3] + np.dtype(_TYPES[head[2]]).itemsize * math.prod(shape)


def read_idx(path: Union[str, os.PathLike[str]]) -> np.ndarray:
    """Read one IDX file, plain or packed with gzip, whatever its name ends in.

    Parameters
    ----------
    path : str or path-like
        The file.

    Returns
    -------
    ndarray
        Shape and dtype as the header says, in the machine's byte order, writable.

    Raises
    ------
    ValueError
        If the file is no IDX file, or is shorter or longer than its header says.
    """
    path = os.fspath(path)
    raw = _content(path)
    known = len(raw) >= 4 and raw[:2] == b"\0\0" and raw[2] in _TYPES
    if not known or not 1 <= raw[3] <= _MOST_DIMENSIONS:
        raise ValueError(
            f"{path}: not an IDX file: it starts with {raw[:4].hex() or 'nothing'}, expected "
            f"0000, a type from 08 to 0e and a number of dimensions, {_MOST_DIMENSIONS} at most"
        )
    dtype, start = np.dtype(_TYPES[raw[2]]), 4 + 4 * raw[3]
    if len(raw) < start:
        raise ValueError(f"{path}: truncated in its header of {start} bytes; fetch it again")
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    expected = _length(raw)
    if len(raw) != expected:
        what = "truncated" if len(raw) < expected else "too long"
        raise ValueError(
            f"{path}: {what}: {len(raw)} bytes, its header {shape} asks for {expected}; "
            "fetch it again"
        )
    try:
        data = np.frombuffer(raw, dtype, offset=start).reshape(shape)
    except ValueError as error:  # dimensions without elements, and too large for numpy
        raise ValueError(f"{path}: its header asks for {shape}: {error}") from error
    return data.astype(dtype.newbyteorder("="))
