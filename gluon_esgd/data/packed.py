"""What `pack_folder` leaves in a folder, and whether files there are still what it has written."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Optional

import numpy as np

from .framing import ends_at
from .records import Path, index_path, mapped

__all__ = [
    "CLASSES",
    "LEFT_OUT",
    "PACKED",
    "SAMPLE",
    "TRAIN",
    "VAL",
    "index_digest",
    "is_as_packed",
]

TRAIN, VAL = "train.rec", "val.rec"
CLASSES, LEFT_OUT, PACKED = "classes.txt", "left-out.txt", "packed.json"

SAMPLE = 256  # records that are looked at: a gap of more than a 255th of the file is found


def index_digest(path_idx: Path) -> str:
    """Return the SHA-256 of an index."""
    with open(path_idx, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def is_as_packed(path_rec: Path) -> bool:
    """Whether a file is what `pack_folder` has written, as far as shows without reading it all.

    Size and index are those that ``packed.json`` beside it tells, and records that are spread
    evenly over the file, the first and the last of them, begin and end where the index says. So
    a copy that was cut short is found, and one with a gap of more than a 255th of the file; a
    single changed byte is not. A file of any other origin is not as packed.

    Parameters
    ----------
    path_rec : str or path-like
        Its index lies beside it.

    Raises
    ------
    OSError
        The file is there and cannot be read.
    """
    path_rec = os.fspath(path_rec)
    path_idx, noted = index_path(path_rec), _noted(path_rec)
    if noted is None or not os.path.isfile(path_idx) or not os.path.isfile(path_rec):
        return False
    if noted != [os.path.getsize(path_rec), index_digest(path_idx)]:
        return False
    with open(path_idx, "rb") as file:  # its form is ours, by the digest
        begins = [int(line.split(b"\t")[1]) for line in file]
    ends = [*begins[1:], noted[0]]
    with mapped(path_rec) as data:
        spread = np.linspace(0, len(begins) - 1, min(SAMPLE, len(begins))).astype(int)
        return all(ends_at(data, begins[k]) == ends[k] for k in spread)


def _noted(path_rec: str) -> Optional[Any]:
    """Return size and digest of the index as ``packed.json`` has them; None where it has not."""
    folder, name = os.path.split(os.path.splitext(path_rec)[0])
    try:
        with open(os.path.join(folder, PACKED), "rb") as file:
            done = json.loads(file.read())
        return [done["bytes"][name], done["index"][name]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
