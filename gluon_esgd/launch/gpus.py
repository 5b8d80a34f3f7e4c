"""Which GPUs of a machine the ranks of a client see, where several clients share it."""

from __future__ import annotations

import os
import re
from typing import List, Mapping, Sequence, Tuple

__all__ = ["VISIBLE", "gpus_of", "mates", "share"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")  # a container may have some only, with their old numbers


def gpus_of(environ: Mapping[str, str], devices: str = "/dev") -> List[str]:
    """Return the GPUs that this process may see, as CUDA names them: by number, from 0 on."""
    if VISIBLE in environ:
        return [name for name in environ[VISIBLE].split(",") if name]
    try:
        count = sum(_DEVICE.fullmatch(name) is not None for name in os.listdir(devices))
    except OSError:
        return []
    return [str(k) for k in range(count)]


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

    A worker's first GPU is that of its place, whatever the number of workers, which grows where
    clients are added; workers without one take turns. The first of each comes first, so that
    the client's ``local_rank`` counts them.
    """
    if len(gpus) < workers:
        return list(dict.fromkeys(gpus[place % len(gpus)] for place in mine)) if gpus else []
    firsts = range(0, len(gpus) - workers + 1, workers)
    return [gpus[first + place] for first in firsts for place in mine]
