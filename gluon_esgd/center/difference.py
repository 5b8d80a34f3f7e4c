"""What an exchange adds to the center: the difference of a client, part by part."""

from __future__ import annotations

from typing import Sequence, Tuple

import numpy as np

from ..optim.elastic import elastic_difference, weight_change
from .layout import CARRIED, MOVED

__all__ = ["Span", "center_difference", "distance_to", "is_finite"]

Span = Tuple[int, int, int]


def center_difference(
    rule: str,
    alpha: float,
    x: np.ndarray,
    center: np.ndarray,
    spans: Sequence[Span],
    out: np.ndarray,
) -> None:
    """Put into `out` what client `x` adds to the center; not finite where its weights are lost.

    Parameters
    ----------
    rule : {'esgd', 'asgd'}
        See `Mailbox.start_exchange` for what each does with each kind.
    alpha : float
    x, center : ndarray of float32, shape (n,)
        Under ``asgd`` `center` is that from which the weights grew.
    spans : sequence of (kind, start, stop)
        As `kind_spans` makes them.
    out : ndarray of float32, shape (n,)
        May be `x` itself.
    """
    for kind, start, stop in spans:
        here = slice(start, stop)
        if kind == CARRIED:
            out[here] = 0
        elif kind == MOVED and rule == "asgd":
            weight_change(x[here], center[here], out=out[here])
        else:
            elastic_difference(x[here], center[here], alpha, out=out[here])


def is_finite(vector: np.ndarray) -> bool:
    """Whether all of `vector` is finite, and not so large that its square is not."""
    return bool(np.isfinite(np.dot(vector, vector)))


def distance_to(center: np.ndarray, x: np.ndarray, spans: Sequence[Span]) -> float:
    """Return the L2 norm of `x` minus `center` over the moved spans."""
    squares = 0.0
    for kind, start, stop in spans:
        if kind == MOVED:
            gap = x[start:stop] - center[start:stop]
            squares += float(np.dot(gap, gap))
    return squares**0.5
