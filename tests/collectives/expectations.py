"""What ranks bring to a collective in the tests, and what it must make of it, by formula."""

from __future__ import annotations

import functools
import warnings
import zlib
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import numpy as np

from gluon_esgd.collectives import part, plan, shared_array
from gluon_esgd.communicator import Communicator

from ..pool import OPEN_MPI_PYTHON, Shape, label

REDUCTIONS = ("allreduce", "reduce_scatter")
DTYPES = ("float16", "float32", "float64", "int32", "int64")
OPERATIONS = ("sum", "mean", "min", "max", "weighted_mean", "weighted_sum")

ALGORITHMS = {
    "allreduce": ["auto", "hierarchical", "library", "local", "ring", "shared"],
    "broadcast": ["auto", "chain", "hierarchical", "library", "local", "shared"],
    "reduce_scatter": ["auto", "library", "local", "ring", "shared"],
    "allgather": ["auto", "library", "local", "ring", "shared"],
}


def on_nodes(*ranks: int) -> Shape:
    """A job whose ranks count as machines of that many ranks each."""
    return Shape(sum(ranks), settings=(("GLUON_ESGD_NODES", ",".join(map(str, ranks))),))


# Four ranks as MPI finds them here are one machine of four.
ONE_NODE = [Shape(1), Shape(2), Shape(3), Shape(4), Shape(3, python=OPEN_MPI_PYTHON)]
SEVERAL_NODES = [
    on_nodes(2, 2),
    on_nodes(1, 1, 1, 1),
    on_nodes(3, 1),
    on_nodes(1, 3),
    on_nodes(2, 1),
]
SHAPES = [*ONE_NODE, *SEVERAL_NODES]


def name_of(shape: Shape) -> str:
    """A test's id: ranks, vendor, and ranks of each declared machine."""
    nodes = dict(shape.settings).get("GLUON_ESGD_NODES")
    return label(shape) + (f"-nodes-{nodes.replace(',', '-')}" if nodes else "")


def takes(algorithm: str, shape: Shape) -> bool:
    """Whether the ranks of `shape` may ask for `algorithm`."""
    if shape.workers == 1:
        return True
    return algorithm != "local" and (algorithm != "shared" or shape in ONE_NODE)


class Case(NamedTuple):
    """One call: elements, their type, the reduction, and where vectors lie."""

    size: int
    dtype: str
    op: str
    where: str  # "private" or "shared"


@functools.lru_cache(maxsize=None)
def _noise() -> np.ndarray:
    return np.random.RandomState(5).randn((1 << 20) + 2000)


@functools.lru_cache(maxsize=None)
def brought(size: int, dtype: str, op: str, counts: Tuple[int, ...]) -> List[List[np.ndarray]]:
    """Each rank's vectors, as many as `counts` says for the rank; a formula in rank and device."""
    return [
        [_vector(17 * rank + device, size, dtype, op) for device in range(count)]
        for rank, count in enumerate(counts)
    ]


def _vector(number: int, size: int, dtype: str, op: str) -> np.ndarray:
    noise = _noise()[7 * number : 7 * number + size] * (number + 1)
    made = (noise * 50 if np.dtype(dtype).kind == "i" else noise).astype(dtype)
    if op.startswith("weighted"):
        made[-2:] = number % 5 + 1, number % 2
    return made


@functools.lru_cache(maxsize=None)
def reduced(size: int, dtype: str, op: str, counts: Tuple[int, ...]) -> Tuple[Any, Any]:
    """The reduction of all vectors, and how far from it each element may be.

    Sums of floats are made in float64, of integers exactly. What is tolerated is one rounding in
    the accumulator's type (float32 for float16) per vector, and half a unit of the result's.
    """
    vectors = [v for each in brought(size, dtype, op, counts) for v in each]
    if op in ("min", "max"):
        combine = np.minimum if op == "min" else np.maximum
        return functools.reduce(combine, vectors), 0
    exact = np.dtype(np.int64 if np.dtype(dtype).kind == "i" else np.float64)
    total: Any = sum(v.astype(exact) for v in vectors)
    magnitude: Any = sum(np.abs(v).astype(exact) for v in vectors)
    divisor = len(vectors) if op == "mean" else 1
    end = size
    if op == "weighted_mean":
        divisor, end = int(total[-2]), size - 2
    if exact.kind == "i":
        total[:end] //= divisor
        return total, 0
    total[:end] /= divisor
    magnitude[:end] /= divisor
    sums = np.finfo(np.float32 if dtype == "float16" else dtype)
    result = np.finfo(dtype)
    rounding = 0.51 * float(result.eps) * np.abs(total) + float(result.tiny) * float(result.eps)
    return total, rounding + len(vectors) * float(sums.eps) * magnitude


def expected(
    collective: str, case: Case, counts: Tuple[int, ...], root: int
) -> Tuple[np.ndarray, Any]:
    """What every rank must hold, its own part only after a reduce_scatter, and the tolerance."""
    if collective in REDUCTIONS:
        return reduced(case.size, case.dtype, case.op, counts)
    firsts = [vectors[0] for vectors in brought(case.size, case.dtype, case.op, counts)]
    if collective == "broadcast":
        return firsts[root], 0
    n = len(firsts)
    return np.concatenate([v[part(case.size, r, n)] for r, v in enumerate(firsts)]), 0


_arenas: Dict[int, np.ndarray] = {}


def memory(case: Case, count: int, comm: Communicator) -> List[np.ndarray]:
    """Room for `count` vectors; in shared memory they are slices that begin at odd places."""
    if case.where == "private":
        return [np.empty(case.size, case.dtype) for _ in range(count)]
    if id(comm) not in _arenas:  # its ranks come here in the same order
        _arenas[id(comm)] = shared_array(1 << 24, np.uint8, comm)
    nbytes = case.size * np.dtype(case.dtype).itemsize
    starts = [8 + k * (nbytes // 8 * 8 + 24) for k in range(count)]
    return [_arenas[id(comm)][s : s + nbytes].view(case.dtype) for s in starts]


@contextmanager
def nothing_said() -> Iterator[None]:
    """Warnings are errors, and numpy would warn of everything; it is set so afterwards too."""
    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        before = np.geterr()
        yield
        assert np.geterr() == before, f"numpy's error state became {np.geterr()}"


def digest(array: np.ndarray) -> int:
    """A number that tells whether the bits of two arrays differ."""
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8))


def attempt(
    collective: str, algorithm: str, case: Case, counts: Tuple[int, ...], comm: Communicator
) -> Tuple[str, int, str]:
    """Make one collective; return its name, its digest for other ranks, and what is wrong."""
    root = case.size % comm.size
    mine = brought(case.size, case.dtype, case.op, counts)[comm.rank]
    room = memory(case, len(mine), comm)
    for into, vector in zip(room, mine):
        into[:] = vector
    arguments: Dict[str, Any] = {"op": case.op} if collective in REDUCTIONS else {}
    if collective == "broadcast":
        arguments["root"] = root
    with nothing_said():
        plan(collective, room, comm, algorithm=algorithm, **arguments)()
    right, tolerance = expected(collective, case, counts, root)
    span = slice(None)
    if collective == "reduce_scatter":
        span = part(case.size, comm.rank, comm.size)
        tolerance = tolerance[span] if np.ndim(tolerance) else tolerance
    fault = ""
    for vector in room:
        far = np.abs(vector[span] - right[span]) > tolerance
        if far.any():
            at = int(far.argmax())
            fault = f"{far.sum()} wrong, first {at}: {vector[span][at]} for {right[span][at]}"
    own_digest = 0 if collective == "reduce_scatter" else digest(room[0])
    if any(digest(vector[span]) != digest(room[0][span]) for vector in room):
        fault = fault or "the vectors of one process differ"
    return f"{' '.join(map(str, case))} {counts}", own_digest, fault


def faults_of(results: List[List[Tuple[str, int, str]]]) -> List[str]:
    """What is wrong in the `attempt` lists of all ranks."""
    found = []
    for same in zip(*results):
        found += [
            f"{name} on rank {rank}: {said}" for rank, (name, _, said) in enumerate(same) if said
        ]
        if len({bits for _, bits, _ in same}) > 1:
            found.append(f"{same[0][0]}: the ranks have different bits")
    return found
