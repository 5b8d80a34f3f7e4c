"""What a server does with what arrives: it adds to the center, or takes an outer step with it."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any, Dict

import mxnet as mx

from ..optim import Outer, outer_update
from .keys import CENTER, STEP, span_of

__all__ = ["COMMAND", "CenterRule", "decode", "encode"]

COMMAND = 0  # the number of the one command that a server obeys; its body is `encode`'s

_log = logging.getLogger("gluon_esgd.center.server")


def encode(outer: Outer) -> str:
    """Return `outer` as the text that an agent sends."""
    return json.dumps(asdict(outer))


def decode(body: bytes) -> Outer:
    """Return what `encode` was given, from bytes that anybody may have sent.

    Raises
    ------
    ValueError
        Where it is anything else.
    """
    try:
        values = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not the fields of Outer, but no JSON: {error!s:.80}") from None
    if not isinstance(values, dict) or set(values) != set(asdict(Outer())):
        raise ValueError(f"not the fields of Outer: {values!r:.80}")
    if any(type(value) is not float for value in values.values()):
        raise ValueError(f"fields of Outer that are not floats: {values!r:.80}")
    return Outer(**values)


class CenterRule:
    """The updater of a server: called for each push that it receives, by one thread.

    Parameters
    ----------
    num_servers : int

    Attributes
    ----------
    outer : Outer
        How a push to a STEP key moves the center.
    """

    def __init__(self, num_servers: int) -> None:
        self.outer = Outer()
        self._span = span_of(num_servers)
        self._centers: Dict[int, Any] = {}
        self._velocities: Dict[int, Any] = {}

    def __call__(self, key: int, received: Any, stored: Any) -> None:
        """Change what is `stored` under `key`, in place, and the center that it belongs to.

        Parameters
        ----------
        key : int
        received : NDArray of float32 or float16
        stored : NDArray of the same type
        """
        kind, index = divmod(key, self._span)
        if kind == CENTER:
            stored += received
            self._centers[index] = stored
            self._velocities.pop(index, None)  # who sets the center sets it at rest
        elif index in self._centers:
            self._move(kind, index, received.astype("float32", copy=False))
            mx.nd.cast(self._centers[index], dtype=stored.dtype, out=stored)
        else:  # an exception could not leave this callback
            _log.error("key %d: a push to a center that nobody has set", key)

    def _move(self, kind: int, index: int, change: Any) -> None:
        center = self._centers[index]
        if kind != STEP or self.outer.is_plain:
            center += change
            return
        if index not in self._velocities:
            self._velocities[index] = mx.nd.zeros_like(center)
        outer_update(center, change, self._velocities[index], self.outer)
