"""The host's part of the collectives on GPUs, over a CuPy that is made of numpy.

Kernels are those of ``kernels.cu``, compiled for the CPU. Streams run as late as they may, as
early, and in between (`fake_cupy`).
"""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple
from unittest import mock

import numpy as np
import pytest

from gluon_esgd.collectives import host_staged, nccl, part, pipeline, plan, prepared
from gluon_esgd.communicator import Communicator, Limits
from gluon_esgd.errors import CollectiveError, StallError

from ..pool import Pools, Shape
from . import fake_cupy, fake_nccl
from .expectations import Case, brought, digest, expected, on_nodes
from .kernel_library import compiler, misaligned

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")

OPERATIONS = ("sum", "mean", "min", "max", "weighted_mean", "weighted_sum")
DTYPES = ("float16", "float32", "float64", "int32", "int64")
SIZES = (2, 67, 1001)
COUNTS = [(1,), (3,)]
CHUNK_BYTES = 512


class Made(NamedTuple):
    """What a collective was, its result, and what is wrong with it."""

    algorithm: str
    bits: int
    fault: str


@contextmanager
def gpus(comm: Communicator, **kinds: Any) -> Iterator[fake_cupy.Machine]:
    """Fake devices, and host memory that is staged in small chunks; collective."""
    kinds.setdefault("number", comm.rank)
    nccl._made.clear()
    with fake_cupy.installed(**kinds) as machine, mock.patch.object(
        host_staged, "CHUNK_BYTES", CHUNK_BYTES
    ):
        yield machine
        gc.collect()
        assert not machine.pinned and not machine.imported, "plans leave memory mapped or pinned"
        comm.barrier("the end of a test")  # others may still read this rank's memory


def _place(number: int, values: np.ndarray, devices: int) -> fake_cupy.Array:
    return fake_cupy.Array(values, number % devices, (3 * number + 1) * values.itemsize)


def _late_write(vector: fake_cupy.Array, values: np.ndarray) -> None:
    """Write as a user's kernel would, on the current stream, some time."""

    def work() -> bool:
        vector.host[:] = values
        return True

    with vector.device:
        fake_cupy.get_current_stream().start(work)


def make(
    comm: Communicator,
    collective: str,
    algorithm: str,
    case: Case,
    counts: Tuple[int, ...],
    devices: int = 4,
) -> Made:
    """Make one collective twice and compare with numpy."""
    with fake_cupy.machine.passing():
        return _make(comm, collective, algorithm, case, counts, devices)


def _make(
    comm: Communicator,
    collective: str,
    algorithm: str,
    case: Case,
    counts: Tuple[int, ...],
    devices: int,
) -> Made:
    root, mine = case.size % comm.size, brought(case.size, case.dtype, case.op, counts)[comm.rank]
    vectors = [_place(k, np.zeros_like(v), devices) for k, v in enumerate(mine)]
    arguments: Dict[str, Any] = {"root": root} if collective == "broadcast" else {}
    if collective in ("allreduce", "reduce_scatter"):
        arguments["op"] = case.op
    made = plan(collective, vectors, comm, algorithm=algorithm, **arguments)
    fault = ""
    right, tolerance = expected(collective, case, counts, root)
    span = slice(None)
    if collective == "reduce_scatter":
        span = part(case.size, comm.rank, comm.size)
    for _ in range(2):
        for vector, values in zip(vectors, mine):
            _late_write(vector, values)
        made()
        for k, vector in enumerate(vectors):
            far = (np.abs(vector.host - right) > tolerance)[span]
            if far.any():
                fault = f"vector {k}: {far.sum()} wrong, first {far.argmax()}"
    return Made(made.algorithm, digest(vectors[0].host[span]), f"{fault} {case}" if fault else "")


def cases(ops: Tuple[str, ...] = OPERATIONS) -> List[Case]:
    return [Case(size, d, op, "device") for size in SIZES for d in DTYPES for op in ops]


def check(results: List[List[Made]], algorithm: str, alike: bool = True) -> None:
    assert results[0] and not [made.fault for rank in results for made in rank if made.fault]
    assert {made.algorithm for rank in results for made in rank} == {algorithm}
    for same in zip(*results):
        assert not alike or len({made.bits for made in same}) == 1


@pytest.mark.parametrize("order", fake_cupy.ORDERS)
@pytest.mark.parametrize("counts", COUNTS, ids=lambda c: f"{c[0]}-vectors")
@pytest.mark.parametrize("algorithm", ["cuda", "host_staged", "nccl"])
def test_one_process_with_several_devices(
    algorithm: str, counts: Tuple[int, ...], order: str
) -> None:
    comm = Communicator()
    with gpus(comm, order=order):
        check([[make(comm, "allreduce", algorithm, case, counts) for case in cases()]], algorithm)
    assert misaligned() == 0


@pytest.mark.parametrize("algorithm", ["cuda", "host_staged"])
def test_several_vectors_on_one_device(algorithm: str) -> None:
    comm = Communicator()
    with gpus(comm):
        for devices, count in ((1, 3), (2, 8)):
            results = [
                make(comm, "allreduce", algorithm, case, (count,), devices) for case in cases()
            ]
            check([results], algorithm)


@pytest.mark.parametrize("algorithm", ["cuda", "host_staged", "nccl"])
def test_a_broadcast_inside_a_process(algorithm: str) -> None:
    comm = Communicator()
    with gpus(comm):
        check([[make(comm, "broadcast", algorithm, c, (3,)) for c in cases(("sum",))]], algorithm)


@pytest.mark.parametrize("version", ["12.3.0", "13.6.0", "14.2.0"])
def test_nccl_of_several_versions_of_cupy(version: str) -> None:
    comm, case = Communicator(), Case(67, "float32", "mean", "device")
    with gpus(comm, version=version):
        check([[make(comm, "allreduce", "nccl", case, (3,))]], "nccl")


def _ranks(
    collective: str,
    algorithm: str,
    counts: Tuple[int, ...],
    ops: Tuple[str, ...],
    sizes: Tuple[int, ...],
    kinds: Dict[str, Any],
) -> List[Made]:
    from gluon_esgd import world

    comm = world().comm
    with gpus(comm, **kinds):
        return [
            make(comm, collective, algorithm, case, counts)
            for case in cases(ops)
            if case.size in sizes
        ]


@pytest.mark.mpi
@pytest.mark.parametrize("order", fake_cupy.ORDERS)
@pytest.mark.parametrize("counts", [(2, 2), (1, 3)], ids=lambda c: f"{c[0]}+{c[1]}")
@pytest.mark.parametrize("algorithm", ["cuda", "host_staged", "nccl"])
def test_two_ranks(pools: Pools, algorithm: str, counts: Tuple[int, ...], order: str) -> None:
    arguments = ("allreduce", algorithm, counts, OPERATIONS, SIZES, {"order": order})
    check(pools.get(Shape(2)).run(_ranks, *arguments), algorithm)


@pytest.mark.mpi
@pytest.mark.parametrize("order", ["late", "mixed"])
@pytest.mark.parametrize("algorithm", ["cuda", "host_staged", "nccl"])
def test_broadcasts_of_two_ranks(pools: Pools, algorithm: str, order: str) -> None:
    arguments = ("broadcast", algorithm, (2, 1), ("sum",), SIZES, {"order": order})
    check(pools.get(Shape(2)).run(_ranks, *arguments), algorithm)


@pytest.mark.mpi
@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather"])
def test_parts_of_two_ranks(pools: Pools, collective: str) -> None:
    pool = pools.get(Shape(2))
    ops = ("sum", "mean", "min", "max") if collective == "reduce_scatter" else ("sum",)
    alike = collective == "allgather"
    for algorithm, sizes, taken in (
        ("host_staged", SIZES, "host_staged"),
        ("auto", (67,), "host_staged"),
        ("nccl", (2,), "nccl"),
        ("nccl", (67,), "host_staged"),  # unequal parts
    ):
        results = pool.run(_ranks, collective, algorithm, (1, 1), ops, sizes, {})
        check(results, taken, alike)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("algorithm", "kinds", "taken"),
    [
        ("auto", {}, "cuda"),
        ("auto", {"private": True}, "host_staged"),
        ("cuda", {"apart": True}, "host_staged"),
        ("nccl", {"shared": True}, "host_staged"),
        ("cuda", {"shared": True}, "cuda"),
    ],
)
def test_what_is_taken_in_place_of_what(
    pools: Pools, algorithm: str, kinds: Dict[str, Any], taken: str
) -> None:
    arguments = ("allreduce", algorithm, (2, 2), ("weighted_mean",), (67,), kinds)
    check(pools.get(Shape(2)).run(_ranks, *arguments), taken)


def _one_cannot(reason: str) -> List[Made]:
    from gluon_esgd import world

    comm = world().comm
    kinds = {"private": reason == "private" and comm.rank == 1}
    with gpus(comm, **kinds), mock.patch.multiple(
        fake_nccl,
        available=reason != "no nccl" or comm.rank == 0,
        fails="no network" if reason == "no start" else None,
    ):
        algorithm = "cuda" if reason == "private" else "nccl"
        case = Case(67, "float32", "mean", "device")
        return [make(comm, "allreduce", algorithm, case, (1, 1))]


@pytest.mark.mpi
@pytest.mark.parametrize("reason", ["private", "no nccl", "no start"])
def test_all_ranks_go_another_way_when_one_must(pools: Pools, reason: str) -> None:
    check(pools.get(Shape(2)).run(_one_cannot, reason), "host_staged")


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [on_nodes(1, 1), on_nodes(2, 1)], ids=["1+1", "2+1"])
@pytest.mark.parametrize(
    ("algorithm", "taken"), [("auto", "nccl"), ("cuda", "host_staged"), ("nccl", "nccl")]
)
def test_several_machines(pools: Pools, shape: Shape, algorithm: str, taken: str) -> None:
    counts = tuple([2, 1, 1][: shape.workers])
    arguments = ("allreduce", algorithm, counts, OPERATIONS, (2, 67, 1001), {"order": "mixed"})
    check(pools.get(shape).run(_ranks, *arguments), taken)


def _half_floats() -> List[Tuple[str, List[float], int]]:
    """On two machines: the algorithm, a weighted mean, and bytes sent."""
    from gluon_esgd import world

    comm = world().comm
    with gpus(comm), fake_cupy.machine.passing():
        return [_mean(comm, None), _mean(comm, "fp16"), (_taken(comm), [], 0)]


def _mean(comm: Communicator, compression: Any) -> Tuple[str, List[float], int]:
    vector = _place(0, np.full(1000, comm.rank + 1.0, np.float32), 4)
    vector.host[-2:] = 4097 + comm.rank, 1
    arguments: Dict[str, Any] = {"op": "weighted_mean", "compression": compression}
    made = plan("allreduce", vector, comm, algorithm="host_staged", **arguments)
    before = comm.sent_bytes
    made()
    return made.algorithm, vector.host.tolist(), comm.sent_bytes - before


def _taken(comm: Communicator) -> str:
    vector = _place(0, np.ones(5, np.float32), 4)
    with pytest.raises(ValueError, match=r"'nccl' adds up what it sends.*'host_staged', or"):
        plan("allreduce", vector, comm, algorithm="nccl", compression="fp16")
    return plan("allreduce", vector, comm, compression="fp16").algorithm


@pytest.mark.mpi
def test_half_floats_between_machines(pools: Pools) -> None:
    for full, half, automatic in pools.get(on_nodes(1, 1)).run(_half_floats):
        assert [full[0], half[0], automatic[0]] == ["host_staged"] * 3
        assert half[1] == full[1], "ones and twos are not rounded, and tails must not be"
        assert half[1][-2:] == [8195.0, 2.0]
        chunks = -(-998 * 4 // CHUNK_BYTES)
        # Both halves of each chunk have a power of two; what MPI does with the tail is not counted.
        assert half[2] == 2 * 998 + 2 * 4 * chunks


def _without_shared_memory() -> List[Made]:
    from gluon_esgd import world

    comm, case = world().comm, Case(1001, "float16", "weighted_mean", "device")
    nothing = lambda nbytes, comm: None  # noqa: E731
    with gpus(comm), mock.patch.object(pipeline, "share", nothing), mock.patch.object(
        prepared, "window", nothing
    ):
        return [make(comm, "allreduce", "host_staged", case, (2, 1))]


@pytest.mark.mpi
def test_host_memory_that_is_not_shared(pools: Pools) -> None:
    check(pools.get(Shape(2)).run(_without_shared_memory), "host_staged")


def test_host_memory_that_cannot_be_pinned(caplog: pytest.LogCaptureFixture) -> None:
    comm, case = Communicator(), Case(1001, "float32", "mean", "device")
    with gpus(comm) as machine, caplog.at_level(logging.WARNING):
        machine.pinnable = False
        check([[make(comm, "allreduce", "host_staged", case, (2,))]], "host_staged")
    assert "host memory cannot be pinned" in caplog.text


def _mixed() -> str:
    from gluon_esgd import world

    comm = world().comm
    with gpus(comm):
        values = np.ones(5, "f")
        vector: Any = fake_cupy.Array(values, 0) if comm.rank else values
        with pytest.raises(ValueError) as caught:
            plan("allreduce", vector, comm)
    return str(caught.value)


@pytest.mark.mpi
def test_gpus_on_one_rank_and_host_memory_on_the_other(pools: Pools) -> None:
    for said in pools.get(Shape(2)).run(_mixed):
        assert "rank 1: float32 of shape (5,) on GPUs" in said


def test_bad_vectors() -> None:
    comm = Communicator()
    with gpus(comm):
        vectors = [fake_cupy.Array(np.ones(2, "f"), 0) for _ in range(17)]
        with pytest.raises(ValueError, match="at most 16 on the GPUs of one process, got 17"):
            plan("allreduce", vectors, comm)
        with pytest.raises(ValueError, match="must all lie on GPUs or all in host memory"):
            plan("allreduce", [vectors[0], np.ones(2, "f")], comm)
        with pytest.raises(ValueError, match="'cuda' is for vectors on GPUs, and these are in"):
            plan("allreduce", np.ones(2, "f"), comm, algorithm="cuda")
        with pytest.raises(ValueError, match="'ring' is for vectors in host memory, and these are"):
            plan("allreduce", vectors[0], comm, algorithm="ring")
        plan("allreduce", fake_cupy.Array(np.ones(0, "f"), 0), comm)()
        del vectors


@pytest.mark.parametrize("algorithm", ["cuda", "host_staged", "nccl"])
def test_an_error_of_a_device_is_raised_and_closes_the_communicator(algorithm: str) -> None:
    comm = Communicator()
    fake_nccl.aborted.clear()
    with gpus(Communicator()) as machine:
        made = plan("allreduce", [fake_cupy.Array(np.ones(9, "f"), 0)], comm, algorithm=algorithm)
        machine.broken = 700
        with pytest.raises(CollectiveError, match=r"an allreduce of .* failed: CUDA error 7"):
            made()
        assert comm.broken
        assert fake_nccl.aborted == ([0] if algorithm == "nccl" else [])
        del made


@pytest.mark.parametrize("algorithm", ["cuda", "host_staged", "nccl"])
def test_a_device_that_hangs_is_waited_for_within_the_limits(algorithm: str) -> None:
    comm = Communicator(limits=Limits(warning_s=0.1, abort_s=0.3))
    with gpus(Communicator()) as machine:
        made = plan("allreduce", [fake_cupy.Array(np.ones(9, "f"), 0)], comm, algorithm=algorithm)
        machine.broken = 600
        with pytest.raises(StallError, match="rank 0 of 1 waits in an allreduce"):
            made("an allreduce")
        del made


def test_what_is_taken_instead_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    comm = Communicator()
    with gpus(comm, apart=True), caplog.at_level(logging.WARNING):
        for _ in range(2):
            vectors = [fake_cupy.Array(np.ones(9, "f"), d) for d in (0, 1)]
            assert plan("allreduce", vectors, comm).algorithm == "host_staged"
        del vectors
    said = [r.message for r in caplog.records if "in place of" in r.message]
    assert len(said) <= 1  # a process says it once, whichever test was first


def test_a_plan_for_the_host_moves_each_chunk_once() -> None:
    comm = Communicator()
    with gpus(comm) as machine:
        size = 10 * CHUNK_BYTES // 4
        made = plan(
            "allreduce", fake_cupy.Array(np.ones(size, "f"), 0), comm, algorithm="host_staged"
        )
        made()
        assert machine.copies == 20  # down and up
        del made
