"""The rules between clients in closed form, without MPI and without MXNet's engine."""

from __future__ import annotations

import numpy as np
import pytest

from gluon_esgd.optim.elastic import (
    check_alpha,
    default_alpha,
    elastic_difference,
    largest_alpha,
    weight_change,
)


def _vectors(count: int) -> np.ndarray:
    return np.random.RandomState(0).randn(count, 1000).astype(np.float32)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.45, 0.5, 0.9])
def test_one_exchange_contracts_the_distance(alpha: float) -> None:
    x, c = _vectors(2)
    d = elastic_difference(x, c, alpha)
    np.testing.assert_allclose((x - d) - (c + d), (1 - 2 * alpha) * (x - c), atol=2e-6)


@pytest.mark.parametrize("clients", [1, 2, 4, 8])
def test_sum_of_clients_and_center_is_conserved(clients: int) -> None:
    *xs, c = _vectors(clients + 1)
    before = sum(xs, c.astype(np.float64))
    for _ in range(100):
        for i in range(clients):
            d = elastic_difference(xs[i], c, default_alpha(clients))
            xs[i], c = xs[i] - d, c + d
    np.testing.assert_allclose(sum(xs, c.astype(np.float64)), before, atol=100 * clients * 1e-6)
    assert max(np.abs(x - c).max() for x in xs) < 1e-3


def test_alpha_zero_and_a_client_at_the_center_change_nothing() -> None:
    x, c = _vectors(2)
    assert not elastic_difference(x, c, 0.0).any()
    assert not elastic_difference(c, c, 0.45).any()


def test_out_is_written() -> None:
    x, c = _vectors(2)
    out = np.empty_like(x)
    assert elastic_difference(x, c, 0.3, out=out) is out
    np.testing.assert_array_equal(out, elastic_difference(x, c, 0.3))
    assert weight_change(x, c, out=out) is out
    np.testing.assert_array_equal(c + out, c + (x - c))


def _run(alpha: float, e: float, clients: int, together: bool) -> float:
    """Distance from the minimum of ``x**2 / 2`` after many steps of length `e`."""
    xs, c = np.linspace(1, 2, clients), -1.0
    for _ in range(400):
        if together:  # every client meets the same center, then takes its gradient step
            ds = alpha * (xs - c)
            xs, c = xs - e * xs - ds, c + ds.sum()
        else:
            for i in range(clients):
                d = alpha * (xs[i] - c)
                xs[i], c = xs[i] - e * xs[i] - d, c + d
    return float(max(np.abs(xs).max(), abs(c)))


@pytest.mark.parametrize("e", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("clients", [1, 2, 4, 8])
def test_bound_for_clients_at_once(e: float, clients: int) -> None:
    bound = largest_alpha(clients, e)
    assert bound == (4 - 2 * e) / (2 * (clients + 1) - e * clients)
    assert _run(0.97 * bound, e, clients, together=True) < 2
    assert _run(1.03 * bound, e, clients, together=True) > 1e3


@pytest.mark.parametrize("e", [0.1, 0.5])
def test_bound_for_round_robin(e: float) -> None:
    bound = (4 - 2 * e) / (4 - e)
    assert _run(0.97 * bound, e, 1, together=False) < 2
    assert _run(1.03 * bound, e, 1, together=False) > 1e3


@pytest.mark.parametrize("clients", [1, 2, 3, 8, 64])
def test_default_is_within_the_bound(clients: int) -> None:
    assert default_alpha(clients) == 0.9 / max(2, clients)
    assert check_alpha(default_alpha(clients), clients) == default_alpha(clients)


@pytest.mark.parametrize(("alpha", "clients"), [(0.7, 2), (-0.1, 2), (1.1, 1), (float("nan"), 2)])
def test_alpha_out_of_bound_is_refused_with_the_bound(alpha: float, clients: int) -> None:
    bound = f"{2 / (1 + clients):.4g}"
    with pytest.raises(ValueError, match=rf"alpha={alpha!r} must lie between 0 and .*= {bound}"):
        check_alpha(alpha, clients)
