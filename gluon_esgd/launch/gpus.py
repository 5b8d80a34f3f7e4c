"""Which GPUs of a machine the ranks of a client see, where several clients share it."""

from __future__ import annotations

import os
import re
from typing import List, Mapping, Sequence, Tuple

__all__ = ["VISIBLE", "gpus_of", "mates", "share"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia(\d+)")


def gpus_of(environ: Mapping[str, str], devices: str = "/dev") -> List[str]:
    """Return the GPUs that this process may see, as CUDA names them."""
    if VISIBLE in environ:
        return [name for name in environ[VISIBLE].split(",") if name]
    try:
        found = [_DEVICE.fullmatch(name) for name in os.listdir(devices)]
    except OSError:
        return []
    return [str(k) for k in sorted(int(match[1]) for match in found if match)]


def mates(places: Sequence[Tuple[int, int]], rank: int) -> Tuple[range, int]:
    """Return the places on `rank`'s machine that its client has, and how many workers are there.

    `places` are place and workers of each rank of the client; its ranks on one machine are
    neighbours in it, and the first one of the next machine is at place 0 there.
    """
    first = last = rank
    while first and places[first - 1] == (places[first][0] - 1, places[first][1]):
        first -= 1
    while last + 1 < len(places) and places[last + 1] == (places[last][0] + 1, places[last][1]):
        last += 1
    return range(places[first][0], places[last][0] + 1), places[rank][1]


def share(gpus: Sequence[str], mine: range, workers: int) -> List[str]:
    """Return the GPUs of a client that has the places `mine` among `workers` of a machine.

    Each worker has ``len(gpus) // workers`` of its own, or one in turn where they are fewer. The
    first of each comes first, so that the client's ``local_rank`` counts them.
    """
    each = len(gpus) // workers
    if each == 0:
        return list(dict.fromkeys(gpus[place % len(gpus)] for place in mine)) if gpus else []
    return [gpus[place * each + k] for k in range(each) for place in mine]
