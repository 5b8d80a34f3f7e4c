"""Momentum of the center: its equations, and where it may not be."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

from gluon_esgd.optim import (
    Outer,
    check_outer,
    default_alpha,
    largest_alpha,
    largest_outer_alpha,
    outer_update,
)


def _numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.asnumpy()


@pytest.mark.parametrize("make", [np.array, mx.nd.array])
@pytest.mark.parametrize(("mu", "eta"), [(0.9, 1.0), (0.5, 0.7), (0.0, 2.0)])
def test_steps_in_one_direction_add_up_to_the_closed_form(make: Any, mu: float, eta: float) -> None:
    start, d, steps = np.array([1.0, -2.0], np.float32), np.array([0.5, 4.0], np.float32), 6
    center, velocity = make(start, dtype="float32"), make([0, 0], dtype="float32")
    kept = center
    for _ in range(steps):
        outer_update(center, make(d, dtype="float32"), velocity, Outer(mu, eta))
    velocities = [(1 - mu**n) / (1 - mu) for n in range(1, steps + 1)]
    wanted = start + eta * d * (steps + mu * sum(velocities))
    np.testing.assert_allclose(_numpy(kept), wanted, rtol=1e-6)
    np.testing.assert_allclose(_numpy(velocity), d * velocities[-1], rtol=1e-6)
    assert _numpy(kept).dtype == np.float32


def test_without_momentum_it_is_the_plain_sum() -> None:
    random = np.random.default_rng(0)
    center, d = (random.standard_normal(1000).astype(np.float32) for _ in "12")
    wanted = center + d
    outer_update(center, d, np.zeros_like(d), Outer())
    assert center.tobytes() == wanted.tobytes() and Outer().is_plain
    assert not Outer(0.1).is_plain and not Outer(learning_rate=0.5).is_plain


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"momentum": 1.0}, "outer momentum=1.0 must be at least 0 and below 1"),
        ({"momentum": -0.1}, "outer momentum=-0.1 must be"),
        ({"momentum": float("nan")}, "outer momentum=nan must be"),
        ({"learning_rate": 0.0}, "outer learning_rate=0.0 must be above 0"),
        ({"learning_rate": float("inf")}, "outer learning_rate=inf must be above 0"),
        ({"learning_rate": float("nan")}, "outer learning_rate=nan must be above 0"),
    ],
)
def test_values_out_of_range(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Outer(**values)


def _radius(alpha: float, outer: Outer, p: int, one_step: bool) -> float:
    """Spectral radius when `p` clients exchange at once, but for moving all by the same."""
    n = p + 2  # x of each client, center, velocity
    parts = np.eye(n)
    differences = [alpha * (parts[i] - parts[p]) for i in range(p)]
    center, velocity = parts[p].copy(), parts[p + 1].copy()
    # Servers take them one after the other, leaders without servers their sum.
    for d in [np.sum(differences, axis=0)] if one_step else differences:
        velocity = outer.momentum * velocity + d
        center = center + outer.learning_rate * (d + outer.momentum * velocity)
    matrix = np.array([*(parts[i] - differences[i] for i in range(p)), center, velocity])
    values = np.linalg.eigvals(matrix)
    return float(np.abs(np.delete(values, np.argmin(np.abs(values - 1)))).max())


@pytest.mark.parametrize("one_step", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("eta", [0.1, 0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("mu", [0.0, 0.3, 0.5, 0.9, 0.99])
def test_the_bound_of_alpha_is_where_exchanges_begin_to_diverge(
    mu: float, eta: float, p: int, one_step: bool
) -> None:
    outer = Outer(mu, eta)
    bound = largest_outer_alpha(outer, p, one_step)
    parts = (0.02, 0.3, 0.7, 0.99, 1.01, 1.5)
    radii = [_radius(bound * part, outer, p, one_step) for part in parts]
    assert max(radii[:4]) < 1 < min(radii[4:])


@pytest.mark.parametrize("p", [1, 2, 5])
def test_without_momentum_the_bound_is_the_known_one(p: int) -> None:
    assert largest_outer_alpha(Outer(), p) == pytest.approx(largest_alpha(p))
    assert largest_outer_alpha(Outer(0.0, 0.5), p) == pytest.approx(2 / (1 + p / 2))


def test_defaults_that_diverge_are_refused_and_the_advice_helps() -> None:
    check_outer(Outer(0.9), default_alpha(4), 4)
    check_outer(Outer(0.9), default_alpha(8), 8, one_step=True)
    check_outer(Outer(), 99.0, 4)  # the moving rate itself is checked elsewhere
    with pytest.raises(ValueError, match=r"momentum=0.9 .* alpha=0.1125 for 8 .* at most 0.05056"):
        check_outer(Outer(0.9), default_alpha(8), 8)
    for mu in (0.5, 0.9, 0.99):
        for p in (1, 2, 4, 8, 16, 64, 256):
            check_outer(Outer(mu, 1 - mu), default_alpha(p), p)
