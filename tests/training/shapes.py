"""The jobs in which what ranks do is tried."""

from __future__ import annotations

from typing import List

import pytest

from ..pool import Shape, label

ANY_RANKS = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        pytest.param(Shape(3), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 0, "esgd"), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 1, "esgd"), marks=pytest.mark.servers),
        pytest.param(Shape(4, 2, 2, "sgd"), marks=pytest.mark.servers),
    ],
    ids=label,
)


def of_rules(workers: int, clients: int, servers: int) -> List[Shape]:
    """Return the job under both rules that have a center on servers."""
    return [Shape(workers, clients, servers, rule) for rule in ("esgd", "asgd")]


_ESGD = [
    pytest.param(Shape(4, 2, 0, "esgd"), marks=pytest.mark.mpi),
    pytest.param(Shape(4, 2, 1, "esgd"), marks=pytest.mark.servers),
]
_ASGD = pytest.param(Shape(4, 2, 1, "asgd"), marks=pytest.mark.servers)

ESGD = pytest.mark.parametrize("shape", _ESGD, ids=label)
ESGD_ASGD = pytest.mark.parametrize("shape", [*_ESGD, _ASGD], ids=label)
