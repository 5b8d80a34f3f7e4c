"""Which record it was, where MXNet's reader only says that one could not be read."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import List, Optional, Tuple

from .decoding import image_fault
from .framing import content, ends_at
from .record_shard import RecordShard
from .records import mapped

__all__ = ["broken_record"]

_log = logging.getLogger(__name__)

_AT_ONCE = 256  # records that wait to be decoded
_LIMIT_S = 60.0  # others wait meanwhile


def broken_record(shard: RecordShard) -> Optional[str]:
    """Name a broken record of a worker's part; None where none is found within a minute.

    Parameters
    ----------
    shard : RecordShard
        The part that was being read.
    """
    path, begun = shard.path_imgrec, time.monotonic()
    _log.warning("%s could not be read on: looking for a broken record", path)
    records = _records(shard)
    with mapped(path) as data, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def fault(record: Tuple[int, int]) -> Optional[str]:
            if ends_at(data, record[1]) is None:
                return "its header is broken"
            return image_fault(content(data, record[1]))

        for start in range(0, len(records), _AT_ONCE):
            some = records[start : start + _AT_ONCE]
            for (number, offset), what in zip(some, pool.map(fault, some)):
                if what is not None:
                    return f"{path}: record {number} at byte {offset}: {what}"
            if time.monotonic() - begun > _LIMIT_S:
                folder = os.path.dirname(path) or "."
                _log.warning("none found so far: gluon-esgd data %s --check looks at all", folder)
                break
    return None


def _records(shard: RecordShard) -> List[Tuple[int, int]]:
    """Return number in the file and offset of each record of the part, as MXNet cuts it."""
    with open(shard.path_imgidx, "rb") as file:
        offsets = sorted(int(line.split()[1]) for line in file)
    longest = -(-shard.records // shard.num_parts)
    first = shard.part_index * longest
    return list(enumerate(offsets))[first : first + longest]
