"""Many processes make what one process makes of the same samples."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np
import pytest

from ..pool import OPEN_MPI_PYTHON, Pools, Shape, label
from .problems import BATCH, assert_at_the_minimum, solve_regression, train_alone, train_shared

MPI = [Shape(2), Shape(3), Shape(4), Shape(3, python=OPEN_MPI_PYTHON)]
ACROSS = [
    Shape(2, clients=2, servers=1, rule="sgd"),
    Shape(3, clients=3, servers=2, rule="sgd"),
    Shape(4, clients=2, servers=2, rule="sgd"),
    Shape(3, clients=3, rule="sgd"),
    Shape(4, clients=2, rule="sgd"),
    Shape(4, clients=2, rule="sgd", python=OPEN_MPI_PYTHON),
]
OPTIMIZERS: Dict[str, Dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3},
    "adam": {"learning_rate": 0.01},
    "elasticsgd": {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
}


def _marks(shape: Shape) -> list:
    return [pytest.mark.servers] if shape.servers else [pytest.mark.mpi]


SHAPES = [pytest.param(s, marks=_marks(s), id=label(s)) for s in MPI + ACROSS]


def _check(pools: Pools, shape: Shape, name: str, sizes: Any = None) -> None:
    expected = train_alone(name, OPTIMIZERS[name])
    results = pools.get(shape).run(train_shared, name, OPTIMIZERS[name], sizes)
    for weights, _ in results:
        np.testing.assert_allclose(weights, expected, rtol=1e-6 * 20, atol=1e-6)
        assert np.linalg.norm(weights - expected) < 1e-6 * np.linalg.norm(expected)
    size = shape.workers // shape.clients
    for first in range(0, shape.workers, size):
        replicas = [digests for _, digests in results[first : first + size]]
        assert all(d == replicas[0] for d in replicas), "replicas differ after a step"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shared_batch_gives_the_weights_of_one_process(
    pools: Pools, shape: Shape, name: str
) -> None:
    assert BATCH % shape.workers == 0
    _check(pools, shape, name)


@pytest.mark.parametrize("shape", SHAPES)
def test_uneven_batches_are_exact(pools: Pools, shape: Shape) -> None:
    _check(pools, shape, "sgd", [1, 5, 2, 4][: shape.workers])


CENTERED = [
    ("esgd", Shape(2, 2, 1, "esgd"), {"interval": 4}),
    ("esgd", Shape(4, 2, 1, "esgd"), {"interval": 8, "lazy": 3}),
    ("esgd", Shape(3, 3, 2, "esgd"), {"interval": 2, "lazy": 0}),
    ("asgd", Shape(3, 3, 2, "asgd"), {}),
    ("asgd", Shape(4, 2, 1, "asgd"), {"interval": 3, "lazy": 2}),
    ("sgd", Shape(4, 2, 2, "sgd"), {}),
    ("esgd", Shape(2, 1, 1, "esgd"), {"interval": 4}),
    ("esgd", Shape(4, 2, 1, "esgd", python=OPEN_MPI_PYTHON), {"interval": 4}),
    ("esgd", Shape(3, 3, 0, "esgd"), {"interval": 2, "lazy": 0}),
    ("esgd", Shape(4, 2, 0, "esgd"), {"interval": 8, "lazy": 3}),
    ("sgd", Shape(4, 2, 0, "sgd"), {}),
    ("esgd", Shape(4, 2, 0, "esgd", python=OPEN_MPI_PYTHON), {"interval": 4}),
]


@pytest.mark.parametrize(
    ("rule", "shape", "settings"),
    [pytest.param(*case, marks=_marks(case[1]), id=label(case[1])) for case in CENTERED],
)
def test_rules_reach_the_minimum_of_a_convex_problem(
    pools: Pools, rule: str, shape: Shape, settings: Dict[str, Any]
) -> None:
    assert_at_the_minimum(pools.get(shape).run(_solve, rule, settings))


def _solve(rule: str, settings: Dict[str, Any]) -> Any:
    return solve_regression(rule, 200, 0.1, **settings)
