"""Read IDX files, the format of MNIST and its kin.

MXNet's own ``gluon.data.vision.FashionMNIST`` accepts only files with the
checksums of its own mirror; the same pictures packed by others it would
replace by a download.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from typing import Union

import numpy as np

__all__ = ["read_idx"]

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        raw = file.read()
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path}: broken gzip file ({error}); fetch it again") from error


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
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES or not raw[3]:
        raise ValueError(
            f"{path}: not an IDX file: it starts with {raw[:4].hex() or 'nothing'}, expected "
            "0000, a type from 08 to 0e and a number of dimensions"
        )
    dtype, start = np.dtype(_TYPES[raw[2]]), 4 + 4 * raw[3]
    if len(raw) < start:
        raise ValueError(f"{path}: truncated in its header of {start} bytes; fetch it again")
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    expected = start + dtype.itemsize * int(np.prod(shape, dtype=np.uint64))
    if len(raw) != expected:
        what = "truncated" if len(raw) < expected else "too long"
        raise ValueError(
            f"{path}: {what}: {len(raw)} bytes, its header {shape} asks for {expected}; "
            "fetch it again"
        )
    data = np.frombuffer(raw, dtype, offset=start).reshape(shape)
    return data.astype(dtype.newbyteorder("="))
