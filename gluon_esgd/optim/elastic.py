r"""The rules between clients as pure functions on numpy arrays.

With client weights :math:`x`, center :math:`c` and moving rate :math:`\alpha`
(Zhang, Choromanska, LeCun, *Deep learning with Elastic Averaging SGD*,
arXiv 1412.6651, equations 5 and 6, with the gradient step taken separately):

.. math:: d = \alpha (x - c), \qquad x \leftarrow x - d, \qquad c \leftarrow c + d

One and the same :math:`d` on both sides: :math:`\sum x + c` is conserved.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

__all__ = [
    "DEFAULT_BETA",
    "check_alpha",
    "default_alpha",
    "elastic_difference",
    "largest_alpha",
    "weight_change",
]

DEFAULT_BETA = 0.9
"""Moving rate times max(2, clients), where neither alpha nor beta is given."""


def elastic_difference(
    x: np.ndarray, center: np.ndarray, alpha: float, out: Optional[np.ndarray] = None
) -> np.ndarray:
    """Rule ``esgd``: return ``d = alpha * (x - center)``; then ``x -= d``, ``center += d``.

    Parameters
    ----------
    x, center : ndarray of float32, the same shape
    alpha : float
        Moving rate, see `check_alpha`.
    out : ndarray, optional
        Where to put the result.
    """
    d = np.subtract(x, center, out=out)
    return np.multiply(d, np.float32(alpha), out=d)


def weight_change(x: np.ndarray, base: np.ndarray, out: Optional[np.ndarray] = None) -> np.ndarray:
    """Rule ``asgd``: return ``u = x - base``, the change since the center `base` was taken.

    The servers add ``u`` to the center; the client then takes the center
    ``c`` and keeps what it did since the snapshot ``x``: ``x_now += c - x``.
    """
    return np.subtract(x, base, out=out)


def default_alpha(num_clients: int, beta: Optional[float] = None) -> float:
    """Return ``beta / max(2, num_clients)``; `beta` is 0.9 unless given.

    One client takes the rate of two: with ``alpha = 0.9`` it would jump to the center.
    """
    return (DEFAULT_BETA if beta is None else beta) / max(2, num_clients)


def largest_alpha(num_clients: int, e: float = 0.0) -> float:
    """Return the largest stable alpha when `num_clients` exchange at once.

    ``alpha <= (4 - 2 e) / (2 (p + 1) - e p)`` for `p` clients, where `e` is
    learning rate times curvature, with one exchange each step; at small `e`
    it is ``2 / (1 + p)``.
    """
    p = num_clients
    return (4 - 2 * e) / (2 * (p + 1) - e * p)


def check_alpha(alpha: float, num_clients: int) -> float:
    """Return `alpha`, or raise ValueError where the exchange would diverge.

    Raises
    ------
    ValueError
        Unless ``0 <= alpha <= 2 / (1 + num_clients)``.
    """
    bound = largest_alpha(num_clients)
    if not 0 <= alpha <= bound:
        raise ValueError(
            f"alpha={alpha!r} must lie between 0 and 2 / (1 + num_clients) = {bound:.4g} for "
            f"{num_clients} clients: above it clients that exchange at once push the center "
            f"further each time; leave it unset for {default_alpha(num_clients):.4g}"
        )
    return alpha
