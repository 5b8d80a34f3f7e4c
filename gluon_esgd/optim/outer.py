r"""Momentum of the center: Nesterov's, on the differences that clients bring.

With momentum :math:`\mu`, rate :math:`\eta` and a difference :math:`d` from a client

.. math:: v \leftarrow \mu v + d, \qquad c \leftarrow c + \eta\,(d + \mu v)

the outer optimizer of DiLoCo (Douillard et al., arXiv 2311.08105), whose outer gradient is the
negative of :math:`d`. With :math:`\mu = 0` and :math:`\eta = 1` it is the plain sum.

Let :math:`p` clients without gradients exchange at once under rule ``esgd``, so that the servers
take :math:`p` steps with differences from the same center. The gaps between clients shrink by
:math:`1 - \alpha`. The gap :math:`g` from the center to their mean and the velocity follow

.. math::

    g \leftarrow (1 - \alpha K)\,g - \eta\mu S\,v, \qquad v \leftarrow \alpha M\,g + \mu^p v,

    M = \sum_{k=0}^{p-1} \mu^k, \quad S = \mu M, \quad
    K = 1 + \eta\,\Big(p + \mu\,\frac{p - S}{1 - \mu}\Big)

which is stable exactly where determinant and trace fulfil :math:`\det < 1` and
:math:`|\mathrm{tr}| < 1 + \det`: two bounds that are linear in :math:`\alpha`.

Without servers the differences of all clients make one step, with
:math:`v \leftarrow \mu v + \alpha p\,g` and :math:`K = 1 + \eta p (1 + \mu)`. One bound is left,

.. math:: \alpha \le \frac{2 (1 + \mu)}{1 + \mu + \eta\,p\,(1 + 2 \mu)}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Outer", "check_outer", "largest_outer_alpha", "outer_update"]


@dataclass(frozen=True)
class Outer:
    """What moves the center when a difference arrives.

    Parameters
    ----------
    momentum : float, default 0
        From 0 to below 1.
    learning_rate : float, default 1
        Above 0.

    Raises
    ------
    ValueError
        Naming the argument that is out of range.
    """

    momentum: float = 0.0
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer momentum={self.momentum!r} must be at least 0 and below 1")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"outer learning_rate={self.learning_rate!r} must be above 0")

    @property
    def is_plain(self) -> bool:
        """Whether the center just adds up what it is sent."""
        return self.momentum == 0 and self.learning_rate == 1


def largest_outer_alpha(outer: Outer, num_clients: int, one_step: bool = False) -> float:
    """Return the largest stable alpha when `num_clients` exchange at once by rule ``esgd``.

    ``2 / (1 + learning_rate * num_clients)`` without momentum. With `one_step` the center takes
    one step with the sum of all differences, as without servers; else one for each client.
    """
    mu, eta, p = outer.momentum, outer.learning_rate, num_clients
    if one_step:
        return 2 * (1 + mu) / (1 + mu + eta * p * (1 + 2 * mu))
    left = mu**p
    m = (1 - left) / (1 - mu)
    s = mu * m
    k = 1 + eta * (p + mu * (p - s) / (1 - mu))
    coupling = eta * mu * s * m
    flip = 2 * (1 + left) / (k * (1 + left) - coupling)  # trace > -1 - determinant
    growth = coupling - k * left
    return flip if growth <= 0 else min(flip, (1 - left) / growth)  # determinant < 1


def check_outer(outer: Outer, alpha: float, num_clients: int, one_step: bool = False) -> None:
    """Raise ValueError where exchanges by rule ``esgd`` would diverge.

    Raises
    ------
    ValueError
        Where `alpha` is above `largest_outer_alpha`.
    """
    bound = largest_outer_alpha(outer, num_clients, one_step)
    if not outer.is_plain and alpha > bound:
        raise ValueError(
            f"outer momentum={outer.momentum:g} and learning_rate={outer.learning_rate:g} with "
            f"alpha={alpha:.4g} for {num_clients} clients: those that exchange at once would swing "
            f"the center further each time; alpha must be at most {bound:.4g}, or take "
            f"learning_rate={1 - outer.momentum:.4g}, with which steps add up to the differences"
        )


def outer_update(center: Any, difference: Any, velocity: Any, outer: Outer) -> None:
    """Move `center` by `difference`, in place, with its `velocity`.

    Parameters
    ----------
    center, difference, velocity : ndarray or NDArray of float32, the same shape
        `velocity` is changed in place too; zeros at first.
    outer : Outer
    """
    velocity *= np.float32(outer.momentum)
    velocity += difference
    center += np.float32(outer.learning_rate) * difference
    center += np.float32(outer.learning_rate * outer.momentum) * velocity
