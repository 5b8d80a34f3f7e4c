"""One conformance suite that every registered algorithm passes, at 1 to 4 ranks and on nodes."""

from __future__ import annotations

from typing import Any, Iterator, List, Tuple

import numpy as np
import pytest

from gluon_esgd.collectives import allgather, allreduce, broadcast, names, part, plan
from gluon_esgd.collectives import reduce_scatter as one_reduce_scatter
from gluon_esgd.collectives.registry import COLLECTIVES, find

from ..pool import Pools, Shape
from .expectations import (
    ALGORITHMS,
    DTYPES,
    OPERATIONS,
    REDUCTIONS,
    SHAPES,
    Case,
    attempt,
    brought,
    digest,
    faults_of,
    memory,
    name_of,
    nothing_said,
    on_nodes,
    takes,
)

TINY, SMALL = (0, 1, 2, 3), (5, 1000)
# Above a window of shared memory, and above several, which are shifted against the parts.
LARGE, LARGEST = (1 << 18) + 3, (1 << 20) + 7

EVERY = [
    pytest.param(shape, collective, algorithm, id=f"{name_of(shape)}-{collective}-{algorithm}")
    for shape in SHAPES
    for collective in COLLECTIVES
    for algorithm in ALGORITHMS[collective]
    if takes(algorithm, shape)
]
every = pytest.mark.parametrize(("shape", "collective", "algorithm"), EVERY)
FEW = [Shape(1), Shape(3), on_nodes(2, 2)]
few = pytest.mark.parametrize(
    ("shape", "collective", "algorithm"), [p for p in EVERY if p.values[0] in FEW]
)


def _is_for_devices(collective: str, algorithm: str) -> bool:
    return algorithm != "auto" and find(collective, algorithm).memory == "device"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_suite_knows_every_algorithm_for_host_memory(collective: str) -> None:
    found = [name for name in names(collective) if not _is_for_devices(collective, name)]
    assert sorted(ALGORITHMS[collective]) == found


def _cases(collective: str) -> Iterator[Case]:
    """All types and reductions at two sizes in both kinds of memory; at others what differs."""
    ops = OPERATIONS if collective in REDUCTIONS else ("sum",)
    some = [(dtype, "sum") for dtype in DTYPES] + [("float32", op) for op in ops[1:]]
    kinds = [(size, *kind) for size in TINY for kind in some]
    kinds += [
        (size, dtype, op) for size in SMALL for dtype in DTYPES for op in ops for _ in range(2)
    ]
    kinds += [(LARGE, *kind) for kind in some for _ in range(2)]
    kinds += [(LARGEST, "float32", op) for op in ops[:1] for _ in range(2)]
    for number, (size, dtype, op) in enumerate(kinds):
        if not op.startswith("weighted") or (collective == "allreduce" and size > 1):
            yield Case(size, dtype, op, ("private", "shared")[number % 2])


def _conform(collective: str, algorithm: str) -> List[Tuple[str, int, str]]:
    from gluon_esgd import world

    comm = world().comm
    counts = (1,) * comm.size
    return [attempt(collective, algorithm, case, counts, comm) for case in _cases(collective)]


@pytest.mark.mpi
@every
def test_values_are_right_and_bits_the_same_on_all_ranks(
    pools: Pools, shape: Shape, collective: str, algorithm: str
) -> None:
    assert faults_of(pools.get(shape).run(_conform, collective, algorithm)) == []


def _several_vectors(collective: str, algorithm: str, uneven: bool) -> List[Tuple[str, int, str]]:
    from gluon_esgd import world

    comm = world().comm
    counts = tuple(1 + (rank % 2 if uneven else 1) for rank in range(comm.size))
    cases = [case for case in _cases(collective) if case.size in (0, 2, 1000)]
    cases.append(Case(LARGE, "float32", "sum", "private"))
    return [attempt(collective, algorithm, case, counts, comm) for case in cases]


@pytest.mark.mpi
@pytest.mark.parametrize("uneven", [False, True], ids=["two-each", "one-or-two"])
@few
def test_several_vectors_of_each_process_take_part_and_are_written(
    pools: Pools, shape: Shape, collective: str, algorithm: str, uneven: bool
) -> None:
    assert faults_of(pools.get(shape).run(_several_vectors, collective, algorithm, uneven)) == []


def _arguments(collective: str, op: str) -> dict:
    return {"op": op} if collective in REDUCTIONS else {}


def _meaning(array: np.ndarray, collective: str, comm: Any) -> np.ndarray:
    """What of a vector has a meaning after the collective."""
    return (
        array[part(array.size, comm.rank, comm.size)] if collective == "reduce_scatter" else array
    )


def _interleaved(collective: str, algorithm: str, where: str) -> List[int]:
    """Digests of two plans, run in turn three times; the vectors are refilled in between."""
    from gluon_esgd import world

    comm = world().comm
    cases = [Case(1000, "float32", "sum", where), Case(LARGE, "float32", "mean", where)]
    rooms = [memory(cases[0], 1, comm)[0], np.empty(LARGE, "float32")]
    plans = [
        plan(collective, room, comm, algorithm=algorithm, **_arguments(collective, case.op))
        for room, case in zip(rooms, cases)
    ]
    digests = []
    for _ in range(3):
        for room, case, made in zip(rooms, cases, plans):
            room[:] = brought(case.size, case.dtype, case.op, (1,) * comm.size)[comm.rank][0]
            made()
            digests.append(digest(_meaning(room, collective, comm)))
    return digests


@pytest.mark.mpi
@few
def test_plans_can_be_run_again_in_turn_and_give_the_same_bits(
    pools: Pools, shape: Shape, collective: str, algorithm: str
) -> None:
    for where in ("private", "shared"):
        for digests in pools.get(shape).run(_interleaved, collective, algorithm, where):
            assert digests == digests[:2] * 3


def _with_a_slow_rank(collective: str, algorithm: str, where: str, op: str) -> List[str]:
    """Each rank in turn is late behind every meeting; all refill their vectors at once."""
    from gluon_esgd import world

    comm = world().comm
    case = Case(11, "float32", op, where)
    room = memory(case, 1, comm)[0]
    made = plan(collective, room, comm, algorithm=algorithm, **_arguments(collective, op))
    faults = []
    for slow in range(comm.size):
        for shift in range(2):
            room[:] = brought(case.size, case.dtype, op, (1,) * comm.size)[comm.rank][0]
            room[: -2 if op == "weighted_mean" else None] += shift * comm.rank
            right = room.copy()
            rows = comm.allgather(right.tolist())
            with _late(comm, comm.rank == slow):
                made()
                got = _meaning(room, collective, comm).copy()
                room[:] = -1000 - comm.rank
            want = _meaning(_by_hand(collective, op, rows), collective, comm)
            if not np.allclose(got, want, rtol=1e-5, atol=1e-5):
                faults.append(f"rank {slow} slow, run {shift}: {got} for {want}")
    return faults


def _by_hand(collective: str, op: str, rows: List[List[float]]) -> np.ndarray:
    table = np.array(rows)
    if collective == "broadcast":
        return table[0]
    if collective == "allgather":
        size, n = table.shape[1], len(table)
        return np.concatenate([table[r][part(size, r, n)] for r in range(n)])
    total = table.sum(0)
    if op == "weighted_mean":
        total[:-2] /= total[-2]
    return total


class _late:
    """A rank that is slow to go on after each meeting with the others of its machine."""

    def __init__(self, comm: Any, slow: bool) -> None:
        self._comm, self._slow = comm, slow

    def __enter__(self) -> None:
        import time

        meet = self._comm.meet

        def late(what: str) -> None:
            meet(what)
            time.sleep(0.01)

        if self._slow:
            self._comm.meet = late

    def __exit__(self, *error: Any) -> None:
        self._comm.__dict__.pop("meet", None)


@pytest.mark.mpi
@few
def test_no_rank_reads_what_another_has_begun_to_write_for_the_next_time(
    pools: Pools, shape: Shape, collective: str, algorithm: str
) -> None:
    for where in ("private", "shared"):
        for op in ("sum", "weighted_mean") if collective == "allreduce" else ("sum",):
            said = pools.get(shape).run(_with_a_slow_rank, collective, algorithm, where, op)
            assert said == [[]] * shape.workers


# What float16 cannot hold on the way, but can in the end.
BEYOND_HALF = {
    "sum": ([60000.0, 2048.0], [60000.0, 1.0], [-60000.0, 1.0], [60000.0, 2050.0]),
    "mean": ([60000.0, 2048.0], [60000.0, 2048.0], [60000.0, 2060.0], [60000.0, 2052.0]),
}


def _beyond_half(collective: str, algorithm: str, op: str, together: bool) -> List[Any]:
    """Three vectors: one on each rank, or all on rank 0 (and vectors that change nothing)."""
    from gluon_esgd import world

    comm = world().comm
    *rows, right = (np.array(row, np.float16) for row in BEYOND_HALF[op])
    wrong = []
    for where in ("private", "shared"):
        for size in (2, 2 * comm.size):
            mine = rows if together else [rows[comm.rank % 3]]
            if together and comm.rank:
                mine = [rows[0] * 0 if op == "sum" else right] * 3
            room = memory(Case(size, "float16", op, where), len(mine), comm)
            for into, row in zip(room, mine):
                into[:] = np.tile(row, size // 2)
            plan(collective, room, comm, op=op, algorithm=algorithm)()
            want = np.tile(right, size // 2)
            got = _meaning(room[0], collective, comm)
            if op == "mean" and together:  # the others pull it towards the mean by no more
                close = np.allclose(got, _meaning(want, collective, comm), rtol=2e-3)
            else:
                close = (got == _meaning(want, collective, comm)).all()
            if not close:
                wrong.append((where, size, got.tolist()))
    return wrong


@pytest.mark.mpi
@pytest.mark.parametrize("together", [False, True], ids=["a-rank-each", "all-in-one-process"])
@pytest.mark.parametrize("op", sorted(BEYOND_HALF))
@pytest.mark.parametrize(
    ("shape", "collective", "algorithm"),
    [p for p in EVERY if p.values[0] in (Shape(3), on_nodes(2, 1)) and p.values[1] in REDUCTIONS],
)
def test_half_floats_are_added_up_in_float32(
    pools: Pools, shape: Shape, collective: str, algorithm: str, op: str, together: bool
) -> None:
    with np.errstate(over="ignore"):
        halves = [np.array(row, np.float16) for row in BEYOND_HALF[op]]
        assert not (halves[0] + halves[1] + halves[2] == halves[3]).all(), "float16 would do too"
    said = pools.get(shape).run(_beyond_half, collective, algorithm, op, together)
    assert said == [[]] * shape.workers


def _half_weights(algorithm: str) -> List[Any]:
    from gluon_esgd import world

    comm = world().comm
    wrong = []
    for where in ("private", "shared"):
        room = memory(Case(3, "float16", "weighted_mean", where), 1, comm)[0]
        weight = (2048.0, 1.0, 1.0)[comm.rank]
        room[:] = weight, weight, 0
        allreduce(room, comm, op="weighted_mean", algorithm=algorithm)
        if room.tolist() != [1.0, 2050.0, 0.0]:
            wrong.append((where, room.tolist()))
    return wrong


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("shape", "collective", "algorithm"),
    [p for p in EVERY if p.values[0] in (Shape(3), on_nodes(2, 1)) and p.values[1] == "allreduce"],
)
def test_weights_in_half_floats_are_added_up_in_float32(
    pools: Pools, shape: Shape, collective: str, algorithm: str
) -> None:
    assert pools.get(shape).run(_half_weights, algorithm) == [[]] * 3


# Of rank 0, of all others, and what comes of them.
SPECIALS = [
    (np.nan, 1.0, {"sum": np.nan, "mean": np.nan, "min": np.nan, "max": np.nan}),
    (1.0, np.nan, {"sum": np.nan, "mean": np.nan, "min": np.nan, "max": np.nan}),
    (np.inf, 1.0, {"sum": np.inf, "mean": np.inf, "min": 1.0, "max": np.inf}),
    (1.0, -np.inf, {"sum": -np.inf, "mean": -np.inf, "min": -np.inf, "max": 1.0}),
    (np.inf, -np.inf, {"sum": np.nan, "mean": np.nan, "min": -np.inf, "max": np.inf}),
    (np.inf, np.nan, {"sum": np.nan, "mean": np.nan, "min": np.nan, "max": np.nan}),
    ("largest", "largest", {"sum": np.inf, "min": "largest", "max": "largest"}),
]


def _number(value: Any, dtype: str) -> float:
    return float(np.finfo(dtype).max) if value == "largest" else value


def _specials(collective: str, algorithm: str) -> List[str]:
    from gluon_esgd import world

    comm, wrong = world().comm, []
    for dtype in ("float16", "float32", "float64"):
        for op in ("sum", "mean", "min", "max"):
            rows = [(a, b, right[op]) for a, b, right in SPECIALS if op in right]
            firsts, others, right = (
                np.tile([_number(x, dtype) for x in column], comm.size) for column in zip(*rows)
            )
            for where in ("private", "shared"):
                room = memory(Case(right.size, dtype, op, where), 1, comm)[0]
                room[:] = others if comm.rank else firsts
                with nothing_said():
                    plan(collective, room, comm, op=op, algorithm=algorithm)()
                got, want = (_meaning(x, collective, comm) for x in (room, right))
                if not np.array_equal(got.astype("float64"), want, equal_nan=True):
                    wrong.append(f"{dtype} {op} {where}: {got} for {want}")
    return wrong


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("shape", "collective", "algorithm"),
    [
        p
        for p in EVERY
        if p.values[0] in (Shape(2), Shape(3), on_nodes(2, 2)) and p.values[1] in REDUCTIONS
    ],
)
def test_nan_and_inf_travel_and_nothing_is_said(
    pools: Pools, shape: Shape, collective: str, algorithm: str
) -> None:
    assert pools.get(shape).run(_specials, collective, algorithm) == [[]] * shape.workers


def _alike_to_the_bit(algorithm: str) -> List[Tuple[str, int]]:
    """Digests of results where the order of two operands shows: zeros and NaNs of both signs."""
    from gluon_esgd import world

    comm, digests = world().comm, []
    values = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, 1.0], np.float32)
    for op in ("sum", "mean", "min", "max"):
        array = values[np.random.RandomState(comm.rank).randint(0, len(values), 5000)]
        array.view(np.uint32)[np.isnan(array)] |= comm.rank  # and each rank's NaN its own
        plan("allreduce", array, comm, op=op, algorithm=algorithm)()
        digests.append((op, digest(array)))
    return digests


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("shape", "collective", "algorithm"), [p for p in EVERY if p.values[1] == "allreduce"]
)
def test_even_zeros_and_nans_have_the_same_bits_on_all_ranks(
    pools: Pools, shape: Shape, collective: str, algorithm: str
) -> None:
    for of_one_op in zip(*pools.get(shape).run(_alike_to_the_bit, algorithm)):
        assert len(set(of_one_op)) == 1


def _moved_specials(collective: str, algorithm: str) -> List[str]:
    """NaNs keep their bits where nothing is computed."""
    from gluon_esgd import world

    comm, wrong = world().comm, []
    for dtype, bits in (("float16", "uint16"), ("float32", "uint32"), ("float64", "uint64")):
        ones = int(np.iinfo(bits).max)  # a NaN with all of its bits set
        rows = [np.full(comm.size + 1, ones - rank, bits) for rank in range(comm.size)]
        for where in ("private", "shared"):
            room = memory(Case(comm.size + 1, dtype, "sum", where), 1, comm)[0]
            room.view(bits)[:] = rows[comm.rank]
            with nothing_said():
                plan(collective, room, comm, algorithm=algorithm)()
            right = rows[0]
            if collective == "allgather":
                spans = [part(comm.size + 1, r, comm.size) for r in range(comm.size)]
                right = np.concatenate([row[s] for row, s in zip(rows, spans)])
            if (room.view(bits) != right).any():
                wrong.append(f"{dtype} {where}: {room.view(bits)}")
    return wrong


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("shape", "collective", "algorithm"),
    [p for p in EVERY if p.values[0] in FEW and p.values[1] not in REDUCTIONS],
)
def test_what_is_only_moved_keeps_every_bit(
    pools: Pools, shape: Shape, collective: str, algorithm: str
) -> None:
    assert pools.get(shape).run(_moved_specials, collective, algorithm) == [[]] * shape.workers


def _weights(algorithm: str) -> List[Any]:
    """Without any weight zeros, errors counted; then weights of all ranks but the first."""
    from gluon_esgd import world

    comm, results = world().comm, []
    for where in ("private", "shared"):
        for value, weight in ((comm.rank + 1.0, 0.0), (7.0 * comm.rank, float(comm.rank))):
            room = memory(Case(5, "float64", "weighted_mean", where), 1, comm)[0]
            room[:] = [value, value, value, weight, comm.rank % 2]
            with nothing_said():
                allreduce(room, comm, op="weighted_mean", algorithm=algorithm)
            results.append(room.tolist())
    return results


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("shape", "collective", "algorithm"), [p for p in EVERY if p.values[1] == "allreduce"]
)
def test_weights_of_zero_and_marks_of_errors(
    pools: Pools, shape: Shape, collective: str, algorithm: str
) -> None:
    n = shape.workers
    weights, errors = n * (n - 1) / 2, float(n // 2)
    # Where no rank has a weight there is nothing to average.
    none = [0.0, 0.0, 0.0, 0.0, errors]
    some = [7.0, 7.0, 7.0, weights, errors] if weights else none
    for said in pools.get(shape).run(_weights, algorithm):
        assert [np.round(row, 12).tolist() for row in said] == [none, some] * 2


def _calls() -> Tuple[List[float], ...]:
    from gluon_esgd import world

    comm = world().comm
    n, rank = comm.size, comm.rank
    summed, sent, owned, gathered = (np.full(n + 1, rank + 1.0) for _ in range(4))
    allreduce(summed, comm)
    broadcast(sent, comm, root=n - 1)
    own = one_reduce_scatter(owned, comm, op="max")
    allgather(gathered, comm)
    return summed.tolist(), sent.tolist(), own.tolist(), gathered.tolist()


@pytest.mark.mpi
@pytest.mark.parametrize("shape", FEW, ids=name_of)
def test_each_collective_in_one_call(pools: Pools, shape: Shape) -> None:
    n = shape.workers
    lengths = [part(n + 1, r, n).stop - part(n + 1, r, n).start for r in range(n)]
    all_parts = [r + 1.0 for r in range(n) for _ in range(lengths[r])]
    for rank, said in enumerate(pools.get(shape).run(_calls)):
        total = [n * (n + 1) / 2] * (n + 1)
        assert said == (total, [float(n)] * (n + 1), [float(n)] * lengths[rank], all_parts)


def _unaligned(algorithm: str) -> List[float]:
    from gluon_esgd import world

    comm = world().comm
    room = np.zeros(4 * 100 + 1, np.uint8)[1:].view(np.float32)
    room[:] = comm.rank + 1
    allreduce(room, comm, algorithm=algorithm)
    return sorted(set(room.tolist()))


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["library", "ring", "shared", "hierarchical"])
@pytest.mark.parametrize("shape", [Shape(3)], ids=name_of)
def test_vectors_may_begin_at_any_address(pools: Pools, shape: Shape, algorithm: str) -> None:
    assert pools.get(shape).run(_unaligned, algorithm) == [[6.0]] * 3
