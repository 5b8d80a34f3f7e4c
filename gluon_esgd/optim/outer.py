r"""Momentum of the center: Nesterov's, on the differences that clients bring.

With momentum :math:`\mu`, rate :math:`\eta` and a difference :math:`d` from a client

.. math:: v \leftarrow \mu v + d, \qquad c \leftarrow c + \eta\,(d + \mu v)

the outer optimizer of DiLoCo (Douillard et al., arXiv 2311.08105), whose outer gradient is the
negative of :math:`d`. With :math:`\mu = 0` and :math:`\eta = 1` it is the plain sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Outer", "outer_update"]


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
