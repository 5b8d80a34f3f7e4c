"""One conformance suite for every registered allreduce, at 1 to 4 ranks."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from gluon_esgd.collectives import allreduce, names
from gluon_esgd.communicator import Communicator

from ..pool import OPEN_MPI_PYTHON, Pools, Shape, label

ALGORITHMS = ["auto", "library", "ring"]
SHAPES = [Shape(2), Shape(3), Shape(4), Shape(3, python=OPEN_MPI_PYTHON)]
SIZES = [0, 1, 2, 3, 5, 1000, 1 << 18, (1 << 20) + 7]


def _vector(rank: int, size: int, dtype: str) -> np.ndarray:
    return (np.random.RandomState(rank).randn(size) * (rank + 1)).astype(dtype)


def _reduce(algorithm: str, size: int, dtype: str) -> tuple:
    from gluon_esgd import world

    array = _vector(world().rank, size, dtype)
    allreduce(array, world().comm, algorithm)
    expected = sum(_vector(r, size, "float64") for r in range(world().size))
    error = float(np.abs(array - expected).max(initial=0))
    return hashlib.sha256(array.tobytes()).hexdigest(), error


def test_the_suite_knows_every_algorithm() -> None:
    assert sorted([*ALGORITHMS, "local"]) == names()


@pytest.mark.mpi
@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sum_is_right_and_has_the_same_bits_on_all_ranks(
    pools: Pools, shape: Shape, algorithm: str
) -> None:
    pool = pools.get(shape)
    for size in SIZES:
        for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-14)):
            results = pool.run(_reduce, algorithm, size, dtype)
            digests, errors = zip(*results)
            assert len(set(digests)) == 1, (size, dtype)
            assert max(errors) < tolerance * shape.workers**2, (size, dtype)


def _twice(size: int) -> bool:
    from gluon_esgd import world

    runs = []
    for _ in range(2):
        array = _vector(world().rank, size, "float32")
        allreduce(array, world().comm, "ring")
        runs.append(array.tobytes())
    return runs[0] == runs[1]


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(3)], ids=lambda s: s.workers)
def test_order_of_the_sum_is_fixed(pools: Pools, shape: Shape) -> None:
    assert all(pools.get(shape).run(_twice, 100_003))


def _specials() -> list:
    from gluon_esgd import world

    array = (
        np.array([np.nan, np.inf, -np.inf, 1.0], np.float32) if world().rank else np.ones(4, "f")
    )
    allreduce(array, world().comm, "ring")
    return array.tolist()


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=lambda s: s.workers)
def test_nan_and_inf_travel(pools: Pools, shape: Shape) -> None:
    for nan, plus, minus, two in pools.get(shape).run(_specials):
        assert nan != nan and plus == np.inf and minus == -np.inf and two == 2


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "local"])
def test_one_rank_changes_nothing(algorithm: str) -> None:
    array = _vector(0, 10, "float32")
    allreduce(array, Communicator(), algorithm)
    assert (array == _vector(0, 10, "float32")).all()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2), np.float32), "1-d"),
        (np.zeros(4, np.float32)[::2], "contiguous"),
        (np.frombuffer(bytes(16), np.float32), "writeable"),
        (np.zeros(4, np.int32), "float32 or float64"),
    ],
)
def test_bad_arrays(array: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allreduce(array, Communicator())


def test_unknown_algorithm() -> None:
    with pytest.raises(ValueError, match="'tree' must be one of auto, library, local, ring"):
        allreduce(np.zeros(1, np.float32), Communicator(), "tree")


def _local() -> str:
    from gluon_esgd import world

    try:
        allreduce(np.zeros(3, np.float32), world().comm, "local")
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=label)
def test_local_is_for_one_rank(pools: Pools, shape: Shape) -> None:
    said = pools.get(shape).run(_local)
    assert said == ["algorithm='local' is for one rank, and there are 2 (an allreduce)"] * 2
