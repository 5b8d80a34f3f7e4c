"""TensorBoard's curves as numbers again."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Dict, Iterator, List, Tuple, Union

__all__ = ["read_curves"]


def read_curves(folder: Union[str, os.PathLike[str]]) -> Dict[str, List[Tuple[int, float]]]:
    """Return the points of each curve in the event files of `folder`, in the order of steps.

    Of steps that a run made again, after a kill, the later ones count.

    Parameters
    ----------
    folder : str or path-like
        ``client{K}`` in the folder of a `TrainingLog`.

    Returns
    -------
    dict of str to list of (int, float)
        Step and value, by the name of the curve.
    """
    curves: Dict[str, List[Tuple[int, float]]] = {}
    for path in sorted(Path(folder).glob("events*"), key=lambda path: path.stat().st_mtime_ns):
        points = list(_points(path.read_bytes()))
        first = min((step for step, _, _ in points), default=0)
        for name, before in curves.items():
            curves[name] = [point for point in before if point[0] < first]
        for step, name, value in points:
            curves.setdefault(name, []).append((step, value))
    return curves


def _points(data: bytes) -> Iterator[Tuple[int, str, float]]:
    """Yield what a file holds; its last record may be cut short, where its writer was killed."""
    from tensorboardX.proto.event_pb2 import Event

    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        record = data[at + 12 : at + 12 + size]  # behind its length and the checksum of that
        if len(record) < size:
            return
        event = Event.FromString(record)
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                yield event.step, value.tag, value.simple_value
        at += 12 + size + 4
