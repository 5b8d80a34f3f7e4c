"""What the command line asks for, checked; all its faults are told at once."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from typing import Callable, List, Optional, Tuple, TypeVar

from ..errors import raise_faults
from ..settings import own_tuning_path, read

__all__ = ["SIZES", "Request", "add_arguments", "request_from", "size_text"]

T = TypeVar("T")

SIZES = tuple(1024 * 4**k for k in range(9))  # 1 KB to 64 MB
LIMIT_S = 60.0
START_S = 4.0  # of the limit, what a job takes to start and to end
_MOST_BYTES = 1 << 34
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Request:
    """What to measure, for how long, and where the table goes."""

    ranks: Tuple[int, ...]
    sizes: Tuple[int, ...]
    limit_s: float
    output: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of the measurement."""
    shown = f"{size_text(SIZES[0])} to {size_text(SIZES[-1])}"
    parser.add_argument(
        "--sizes", metavar="A,B", help=f"bytes of the vectors, as 1K,64K,16M (default: {shown})"
    )
    parser.add_argument(
        "--time-limit", metavar="SECONDS", help=f"for everything (default: {LIMIT_S:g})"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the table (default: what GLUON_ESGD_TUNING names, else "
        "~/.config/gluon_esgd/tuning.json)",
    )


def request_from(
    options: argparse.Namespace, ranks: Optional[str] = None, otherwise: Tuple[int, ...] = ()
) -> Request:
    """Return what parsed options ask for; the ranks are those in a text, or else `otherwise`.

    Raises
    ------
    ValueError
        Lists every fault.
    """
    faults: List[str] = []

    def get(
        text: Optional[str], flag: str, convert: Callable[[str], T], default: T, kind: str
    ) -> T:
        if text is None:
            return default
        try:
            return convert(text)
        except (ValueError, OverflowError):
            faults.append(f"{flag} {text!r} must be {kind}")
            return default

    counts = get(ranks, "-n", _counts, otherwise, "numbers of ranks of at least 2, as 2,4")
    sizes = get(options.sizes, "--sizes", _sizes, SIZES, "bytes from 4 to 16G, as 1K,64K,16M")
    limit_s = get(options.time_limit, "--time-limit", _seconds, LIMIT_S, "seconds above 0")
    least_s = len(counts) * (START_S + 1)
    if limit_s < least_s:
        faults.append(f"--time-limit {limit_s:g} is too short: give at least {least_s:g}")
    if options.output == "":
        faults.append("--output '' must be the name of a file")
    raise_faults("command line", faults)
    return Request(counts, sizes, limit_s, options.output or read().tuning or own_tuning_path())


def _counts(text: str) -> Tuple[int, ...]:
    counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    if min(counts) < 2:
        raise ValueError
    return counts


def _sizes(text: str) -> Tuple[int, ...]:
    return tuple(sorted({_size(part) for part in text.split(",")}))


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.strip().upper())
    if match is None or not 4 <= int(match[1]) * _UNITS[match[2]] <= _MOST_BYTES:
        raise ValueError
    return int(match[1]) * _UNITS[match[2]] // 4 * 4


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def size_text(nbytes: int) -> str:
    """Return a size as people write it: 64K, 16M."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)
