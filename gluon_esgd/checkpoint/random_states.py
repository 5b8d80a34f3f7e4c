"""Random numbers of a process: Python's, numpy's global ones and MXNet's.

MXNet 1.9.1 does not show the state of its generators. So at a checkpoint a number is drawn from
them, they are seeded with it, and the number is kept: a run that goes on from the checkpoint draws
what the run that wrote it drew afterwards.
"""

from __future__ import annotations

import random
from typing import Any, Dict, Optional

import mxnet as mx
import numpy as np

from ..states import Array

__all__ = ["in_arrays", "put", "read", "renew_mxnet", "seed_mxnet"]

_SEEDS = 2**31 - 1


def read() -> Dict[str, Any]:
    """Return where Python's and numpy's generators stand, as JSON can say it."""
    version, words, gauss = random.getstate()
    name, key, *rest = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), [int(word) for word in key], *rest],
    }


def in_arrays(states: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """Return what `read` returned in the form that files have."""
    if states is None:
        return None
    return {
        kind: [first, Array(np.array(words, np.uint32), "numpy"), *rest]
        for kind, (first, words, *rest) in states.items()
    }


def put(states: Dict[str, Any]) -> None:
    """Put back what `read` returned, in either form.

    Raises
    ------
    ValueError
        On this rank: they are not of this Python or numpy; both are as they were.
    """
    before = read()
    try:
        _put(states)
    except Exception as error:
        _put(before)
        raise ValueError(f"random states of another Python or numpy ({error})") from error


def _put(states: Dict[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(_words(words).tolist()), gauss))
    name, key, *rest = states["numpy"]
    np.random.set_state((name, _words(key), *rest))


def _words(found: Any) -> np.ndarray:
    return np.asarray(found.host if isinstance(found, Array) else found, np.uint32)


def renew_mxnet() -> int:
    """Seed MXNet's generators, on all devices, with a number drawn from them, and return it."""
    seed = int(mx.nd.random.randint(0, _SEEDS, shape=(1,), ctx=mx.cpu()).asscalar())
    mx.random.seed(seed)
    return seed


def seed_mxnet(seed: int) -> None:
    """Let MXNet's generators go on as they did after `renew_mxnet`."""
    mx.random.seed(seed)
