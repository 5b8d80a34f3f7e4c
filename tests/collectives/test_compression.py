"""Half floats between machines: how far from the exact result, on how many bytes, and the same."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple
from unittest import mock

import numpy as np
import pytest

from gluon_esgd.collectives import allreduce, part, plan, prepared
from gluon_esgd.collectives.choice import among_messages, choose, choose_on_devices
from gluon_esgd.collectives.half_floats import BLOCK, HalfFloats, Message, largest_message
from gluon_esgd.communicator import Communicator

from ..pool import OPEN_MPI_PYTHON, Pools, Shape
from .expectations import Case, brought, digest, faults_of, memory, name_of, nothing_said, on_nodes

UNIT = 2.0**-11  # by how much of itself rounding to a half float changes a number at most
LEAST = 2.0**-39  # and of the largest number in its block, where it is that much smaller
EXACT = 2  # elements of a tail

NODES = [(1, 1), (2, 1), (1, 1, 1), (2, 2), (3, 1), (1, 3), (1, 1, 1, 1)]
SEVERAL = [on_nodes(*nodes) for nodes in NODES]
SHAPES = [*SEVERAL, on_nodes(2, 1)._replace(python=OPEN_MPI_PYTHON)]
ALGORITHMS = ("auto", "hierarchical", "ring")
LARGE = 9 * BLOCK + 3  # in private memory more than a window


def roundings(algorithm: str, nodes: Sequence[Sequence[int]]) -> int:
    """How often a sum is rounded at most, on its way and when it is finished."""
    size = sum(map(len, nodes))
    here = {rank: k for k, ranks in enumerate(nodes) for rank in ranks}
    far = sum(here[rank] != here[(rank + 1) % size] for rank in range(size))
    return len(nodes) if algorithm == "hierarchical" else min(far, size - 1) + 1


def _cases() -> Iterator[Case]:
    kinds = [(d, o) for d in ("float32", "float64") for o in ("sum", "weighted_mean")]
    kinds += [("float32", op) for op in ("mean", "min", "max", "weighted_sum")]
    for number, size in enumerate((0, 1, 2, 3, 5, 1001)):
        for dtype, op in kinds:
            if size > 1 or not op.startswith("weighted"):
                yield Case(size, dtype, op, ("private", "shared")[number % 2])
    for where in ("private", "shared"):
        yield Case(LARGE, "float32", "weighted_mean", where)
        yield Case(LARGE, "float64", "sum", where)


def _mine(case: Case, count: int, rank: int) -> np.ndarray:
    """Vectors of all ranks, with weights that only float32 can add up."""
    vector = brought(case.size, case.dtype, case.op, (1,) * count)[rank][0].copy()
    if case.op.startswith("weighted"):
        vector[-2:] = (1 << 24) // count - 2 * rank - 1, rank % 2
    return vector


def _bounds(case: Case, count: int, times: int) -> Tuple[np.ndarray, np.ndarray]:
    """The exact result, and how far from it each element may be after so many roundings."""
    rows = np.array([_mine(case, count, rank) for rank in range(count)], np.float64)
    if case.op in ("min", "max"):  # what was rounded once is not changed by it again
        right = rows.min(0) if case.op == "min" else rows.max(0)
        size = np.abs(rows).max(0)
        return right, UNIT * size + times * LEAST * size.max(initial=0)
    right, size = rows.sum(0), np.abs(rows).sum(0)
    added = float(np.finfo(case.dtype).eps) * count * size
    far = times * (UNIT * size + LEAST * size.max(initial=0)) * (1 + times * UNIT) + added
    end = case.size - EXACT if case.op.startswith("weighted") else case.size
    far[end:] = 0
    divisor = right[end] if case.op == "weighted_mean" else count if case.op == "mean" else 1
    right[:end] /= divisor
    far[:end] /= divisor
    return right, far + np.finfo(case.dtype).eps * np.abs(right) * (np.arange(case.size) < end)


def _attempts(algorithm: str) -> List[Tuple[str, int, str]]:
    """Make each collective twice; its name, its digest for other ranks, and what is wrong."""
    from gluon_esgd import world

    comm, found = world().comm, []
    for case in _cases():
        room = memory(case, 1, comm)[0]
        made = plan("allreduce", room, comm, op=case.op, algorithm=algorithm, compression="fp16")
        right, far = _bounds(case, comm.size, roundings(made.algorithm, comm.nodes))
        seen = []
        for _ in range(2):
            room[:] = _mine(case, comm.size, comm.rank)
            with nothing_said():
                made()
            seen.append(digest(room))
        wrong = np.abs(room - right) > far
        fault = f"{wrong.sum()} wrong, first {wrong.argmax()}" if wrong.any() else ""
        fault = fault or ("" if seen[0] == seen[1] else "other bits the second time")
        found.append((f"{made.algorithm} {case}", seen[0], fault))
    return found


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_errors_are_within_bounds_and_bits_the_same(
    pools: Pools, shape: Shape, algorithm: str
) -> None:
    results = pools.get(shape).run(_attempts, algorithm)
    assert faults_of(results) == []
    if algorithm == "auto":
        several = min(_nodes(shape)) > 1
        taken = {name.split()[0] for name, _, _ in results[0]}
        assert taken == {"hierarchical" if several else "ring"}


def _nodes(shape: Shape) -> List[int]:
    return [int(n) for n in dict(shape.settings)["GLUON_ESGD_NODES"].split(",")]


class Sent(NamedTuple):
    """Bytes that a rank sent with and without compression, and whether the results differ."""

    half: int
    full: int
    differs: bool


def _sent(size: int, op: str, algorithm: str) -> Sent:
    from gluon_esgd import world

    comm, counts, rooms = world().comm, [], []
    for compression in ("fp16", None):
        room = memory(Case(size, "float32", op, "shared"), 1, comm)[0]
        room[:] = brought(size, "float32", op, (1,) * comm.size)[comm.rank][0]
        before = comm.sent_bytes
        allreduce(room, comm, op=op, algorithm=algorithm, compression=compression)
        counts.append(comm.sent_bytes - before)
        rooms.append(room.copy())
    return Sent(*counts, bool((rooms[0] != rooms[1]).any()))


def _message_bytes(span: slice, end: int) -> int:
    """Two bytes an element and four a block; of what lies behind `end` four an element."""
    rounded = max(0, min(span.stop, end) - span.start)
    return 2 * rounded + 4 * -(-rounded // BLOCK) + 4 * (span.stop - span.start - rounded)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [on_nodes(2, 2), on_nodes(1, 1), on_nodes(2, 1)], ids=name_of)
@pytest.mark.parametrize("op", ["sum", "weighted_mean"])
def test_hierarchical_sends_half_the_bytes(pools: Pools, shape: Shape, op: str) -> None:
    nodes, tail = _nodes(shape), EXACT if op == "weighted_mean" else 0
    owners, count = min(nodes), len(nodes)
    for size in (24_000 + tail, 24 * BLOCK + tail):
        results = pools.get(shape).run(_sent, size, op, "hierarchical")
        for rank, sent in enumerate(results):
            local = rank if rank < nodes[0] else rank - nodes[0]
            if local >= owners:
                assert sent == Sent(0, 0, True)
                continue
            length = (size - tail) // owners
            parts = [part(length + tail, k, count) for k in range(count)]
            each = [_message_bytes(span, length) for span in parts]
            # Two machines: one part while they are reduced, the other when they are gathered.
            assert sent.half == sum(each), (size, rank)
            assert sent.full == 4 * (length + tail)
            assert sent.half - sent.full / 2 <= 4 * (length // BLOCK + 2) + 2 * tail
            assert sent.differs, "nothing was rounded"


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [on_nodes(2, 2), on_nodes(1, 1, 1)], ids=name_of)
def test_a_ring_sends_half_floats_to_other_machines(pools: Pools, shape: Shape) -> None:
    n, size = shape.workers, 12_000
    for rank, sent in enumerate(pools.get(shape).run(_sent, size, "sum", "ring")):
        goes_far = len(_nodes(shape)) == n or rank in (1, 3)
        length = size // n
        message = _message_bytes(slice(0, length), length)
        # Finished parts go as they were rounded, and nothing is lost by it any more.
        first = message if goes_far else 4 * length
        assert sent.half == (n - 1) * (first + message) and sent.full == 8 * (n - 1) * length


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["auto", "shared", "hierarchical", "ring", "library"])
def test_on_one_machine_nothing_changes(pools: Pools, algorithm: str) -> None:
    for sent in pools.get(Shape(3)).run(_sent, 1001, "weighted_mean", algorithm):
        assert sent.half == sent.full and not sent.differs


# Rank 0 brings one of these in the midst of ones of either sign, the others bring only those.
STRANGE: Dict[str, Tuple[Sequence[float], Callable[[np.ndarray], bool]]] = {
    "inf": ([np.inf, -np.inf], lambda got: bool((got == [np.inf, -np.inf]).all())),
    "nan": ([np.nan, np.nan], lambda got: bool(np.isnan(got).all())),
    "huge": ([3e38, -2e38], lambda got: bool(np.allclose(got, [3e38, -2e38], rtol=4 * UNIT))),
}


def _strange(name: str, algorithm: str, size: int) -> Tuple[int, str]:
    from gluon_esgd import world

    comm, (values, is_right) = world().comm, STRANGE[name]
    room = memory(Case(size, "float32", "sum", "shared"), 1, comm)[0]
    room[:] = np.resize([1.0, -1.0], size)
    places = [size // 3, size // 2]
    if comm.rank == 0:
        room[places] = values
    with nothing_said():
        allreduce(room, comm, algorithm=algorithm, compression="fp16")
    others = np.delete(room, places)
    ones = np.delete(np.resize([1.0, -1.0], size), places) * comm.size
    # Beside 3e38 a one is nothing: what does not overflow is within the bound of its block.
    far = 4 * LEAST * 3e38 if name == "huge" else 0
    fault = "" if is_right(room[places]) else f"{room[places]}"
    if (np.abs(others - ones) > far).any():
        fault += " and others are wrong"
    return zlib.crc32(room.tobytes()), fault


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("shape", [on_nodes(2, 2), on_nodes(1, 1, 1)], ids=name_of)
def test_what_is_not_finite_arrives_and_nothing_overflows(
    pools: Pools, shape: Shape, algorithm: str, name: str
) -> None:
    for size in (7, 3 * BLOCK):
        results = pools.get(shape).run(_strange, name, algorithm, size)
        assert {fault for _, fault in results} == {""} and len({bits for bits, _ in results}) == 1


def _sizes_of_blocks(algorithm: str) -> List[float]:
    """The largest relative error in each block, whose elements are of one magnitude."""
    from gluon_esgd import world

    comm, count = world().comm, 6
    room = memory(Case(2 * count * BLOCK, "float32", "sum", "shared"), 1, comm)[0]
    table = room.reshape(count, -1)
    magnitudes = np.array([1e30, 1e-30, 1.0, 1e-38, 1e5, 1e-42], np.float32)[:, None]
    table[:] = magnitudes
    table *= np.linspace(0.5, 1, table.shape[1], dtype=np.float32)
    right = table.astype(np.float64) * comm.size
    allreduce(room, comm, algorithm=algorithm, compression="fp16")
    return np.abs(table / right - 1).max(1).tolist()


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
@pytest.mark.parametrize("shape", [on_nodes(2, 2), on_nodes(1, 1)], ids=name_of)
def test_neither_large_nor_tiny_values_are_lost(pools: Pools, shape: Shape, algorithm: str) -> None:
    times = roundings(algorithm, [[0, 1], [2, 3]] if shape.workers == 4 else [[0], [1]])
    for errors in pools.get(shape).run(_sizes_of_blocks, algorithm):
        assert max(errors) <= times * UNIT * 1.01


def _without_shared_memory() -> Tuple[str, List[float]]:
    from gluon_esgd import world

    comm = world().comm
    room = np.full(5, comm.rank + 1.0, np.float32)
    room[-2:] = 4097, comm.rank
    with mock.patch.object(prepared, "window", lambda nbytes, comm: None):
        made = plan("allreduce", room, comm, op="weighted_sum", compression="fp16")
    made()
    return made.algorithm, room.tolist()


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [on_nodes(2, 2)], ids=name_of)
def test_a_ring_in_place_of_shared_memory(pools: Pools, shape: Shape) -> None:
    for result in pools.get(shape).run(_without_shared_memory):
        assert result == ("ring", [10.0, 10.0, 10.0, 4 * 4097.0, 6.0])


def _several(algorithm: str) -> List[List[float]]:
    from gluon_esgd import world

    comm = world().comm
    vectors = [np.full(4, 1.0 + k, np.float32) for k in range(1 + comm.rank % 2)]
    for vector in vectors:
        vector[-2:] = 4097, 1
    allreduce(vectors, comm, op="weighted_sum", algorithm=algorithm, compression="fp16")
    return [vector.tolist() for vector in vectors]


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [on_nodes(2, 2)], ids=name_of)
def test_several_vectors_of_a_process(pools: Pools, shape: Shape, algorithm: str) -> None:
    result = [8.0, 8.0, 6 * 4097.0, 6.0]
    assert pools.get(shape).run(_several, algorithm) == [[result] * n for n in (1, 2, 1, 2)]


def test_auto_takes_what_can_compress(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(*machines: int) -> Any:
        nodes = [[0] * n for n in machines]
        return SimpleNamespace(nodes=nodes, size=sum(machines), rank=0)

    measured = {"to": "library"}
    monkeypatch.setattr("gluon_esgd.collectives.choice.tuned", lambda *_: measured["to"])
    for nbytes in (4, 1 << 26):
        assert choose("allreduce", nbytes, ranks(2, 2)) == "library"
        assert choose("allreduce", nbytes, ranks(2, 2), True) == "hierarchical"
        assert choose("allreduce", nbytes, ranks(3, 1), True) == "ring"
        assert among_messages("allreduce", nbytes, True) == "ring"
        assert choose_on_devices("allreduce", nbytes, ranks(1, 1), True) == "host_staged"
    measured["to"] = "ring"
    assert choose("allreduce", 4, ranks(2, 2), True) == "ring"


def test_one_process_changes_nothing() -> None:
    vector = np.array([1 + 2.0**-20, 3], np.float32)
    plan("allreduce", vector, Communicator(), compression="fp16")()
    assert vector.tolist() == [1 + 2.0**-20, 3]


def _through(values: np.ndarray, exact: int = 0) -> Tuple[Message, np.ndarray]:
    """The message of `values`, and what it brings."""
    room = np.empty(largest_message(values.size, exact, values.dtype), np.uint8)
    message = Message.over(room, values.size, exact, values.dtype)
    half_floats, back = HalfFloats(values.dtype), np.full_like(values, 7)
    half_floats.write(values, message)
    half_floats.read(message, back)
    return message, back


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounding_is_that_of_ieee_754(dtype: str) -> None:
    """Every half float between 2^-14 and 2^14, what lies in the middle, and beside the middle."""
    halves = np.arange(0x0400, 0x7400, dtype=np.uint16).view(np.float16).astype(dtype)
    middles = (halves[1:] + halves[:-1]) / 2
    step = np.finfo(np.float32).eps
    numbers = np.concatenate([halves, middles, middles * (1 + step), middles * (1 - step)])
    values = np.concatenate([[2.0**14 * 1.5], numbers, -numbers]).astype(dtype)
    for start in range(0, values.size, BLOCK - 1):
        block = np.concatenate([values[:1], values[start : start + BLOCK - 1]])  # scaled by 1
        message, back = _through(block)
        want = block.astype(np.float32).astype(np.float16)
        assert message.scales == [1]
        assert (message.halves.view(np.float16) == want).all() and (back == want).all()


def test_signs_of_zero_subnormal_half_floats_and_tails() -> None:
    largest = np.float32(2.0**14)
    values = np.array([largest, 0.0, -0.0, 2.0**-24, -3 * 2.0**-24, 2.0**-26, 1 / 3, 1 / 7], "f")
    message, back = _through(values, exact=2)
    assert message.buffer.nbytes == 2 * 6 + 4 + 2 * 4
    assert back.tolist()[:5] == values.tolist()[:5] and np.signbit(back[1:3]).tolist() == [0, 1]
    assert back[5] == 0 and (back[-2:] == values[-2:]).all()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_each_block_has_a_power_of_two(size: int) -> None:
    values = np.arange(size, dtype=np.float32)
    message, back = _through(values)
    assert message.scales.size == -(-size // BLOCK)
    for number, scale in enumerate(message.scales):
        peak = values[number * BLOCK : (number + 1) * BLOCK].max()
        assert not peak or 2**14 <= peak * scale < 2**15
    assert (np.abs(back - values) <= UNIT * values).all()
