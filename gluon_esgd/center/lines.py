"""JSON objects, one on a line: how launcher, stations and leaders talk.

They travel on pipes and Unix stream sockets. What arrives may be anything;
errors never repeat it, since some messages carry the job's secret.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Dict, Iterator, List

__all__ = ["LARGEST", "Lines", "encode", "integer", "parse", "short_path", "text"]

LARGEST = 1 << 20  # bytes of a line


class Lines:
    """Cuts a stream into lines; one over `LARGEST` is skipped and counted.

    Attributes
    ----------
    too_long : int
        Lines that were skipped.
    """

    def __init__(self) -> None:
        self._rest, self._skipping, self.too_long = b"", False, 0

    def feed(self, data: bytes) -> List[bytes]:
        """Return the lines that `data` completes."""
        *lines, rest = (self._rest + data).split(b"\n")
        whole = [line for line in lines if self._is_whole(line)]
        if len(rest) > LARGEST:
            self._skip()
        self._rest = b"" if self._skipping else rest
        return whole

    def _is_whole(self, line: bytes) -> bool:
        if len(line) > LARGEST:
            self._skip()
        skipped, self._skipping = self._skipping, False
        return not skipped

    def _skip(self) -> None:
        self.too_long += not self._skipping
        self._skipping = True


def parse(line: bytes) -> Dict[str, Any]:
    """Return the object on a line; ValueError where it is anything else."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError:
        raise ValueError("it is no JSON") from None
    if not isinstance(message, dict):
        raise ValueError("it is no JSON object")
    return message


def encode(message: Dict[str, Any]) -> bytes:
    """Return `message` as a line; ValueError where that is over `LARGEST`."""
    try:
        line = json.dumps(message).encode()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if len(line) > LARGEST:
        raise ValueError(f"it has {len(line)} bytes, over the limit of {LARGEST}")
    return line + b"\n"


def integer(message: Dict[str, Any], name: str, low: int = 0) -> int:
    """Return a field that must be an integer of at least `low`."""
    value = message.get(name)
    if type(value) is not int or value < low:
        raise ValueError(f"its '{name}' must be an integer of at least {low}")
    return value


def text(message: Dict[str, Any], name: str) -> str:
    """Return a field that must be a text that is not empty."""
    value = message.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"its '{name}' must be a text that is not empty")
    return value


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Give a name for a socket's `path` that is short enough to bind or connect to.

    The kernel takes 107 bytes; job folders are often deeper.
    """
    folder = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)
