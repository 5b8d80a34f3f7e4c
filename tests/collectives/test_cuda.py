"""Collectives on real GPUs; with one they share it, with several each rank takes its own.

Needs CuPy, and mpi4py for several ranks; not MXNet: ``PYTHONPATH=. pytest -m gpu``.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import numpy as np
import pytest

from gluon_esgd.collectives import part, plan
from gluon_esgd.collectives.devices import Queue, address, device_of, has_nccl, load, wait
from gluon_esgd.collectives.kernels import Launch, reducing
from gluon_esgd.collectives.operations import OPERATIONS
from gluon_esgd.communicator import Communicator

from ..pool import Pools, Shape
from .expectations import DTYPES, Case, brought, digest, expected, on_nodes

# What CuPy warns of is not ours: where it found no CUDA folder, say.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

OPERATION_NAMES = ("sum", "mean", "min", "max", "weighted_mean")
SIZES = (2, 3, 1001, (1 << 20) + 3)  # the last in several chunks of `host_staged`


def _devices() -> int:
    return int(load().cuda.runtime.getDeviceCount())


def _on_device(values: np.ndarray, device: int, offset: int) -> Any:
    """Copy `values` to a vector that starts `offset` elements behind a multiple of 256 bytes."""
    cupy = load()
    with cupy.cuda.Device(device):
        vector = cupy.zeros(values.size + offset, values.dtype)[offset:]
        vector[:] = cupy.asarray(values)
    return vector


def _make(
    comm: Communicator, collective: str, algorithm: str, case: Case, counts: Tuple[int, ...]
) -> Tuple[str, int, str]:
    """Make one collective; return what was taken, a digest, and what is wrong."""
    root, mine = case.size % comm.size, brought(case.size, case.dtype, case.op, counts)[comm.rank]
    before = sum(counts[: comm.rank])
    vectors = [
        _on_device(v, (before + k) % _devices(), 3 * k + comm.rank) for k, v in enumerate(mine)
    ]
    arguments: Dict[str, Any] = {"root": root} if collective == "broadcast" else {}
    if collective in ("allreduce", "reduce_scatter"):
        arguments["op"] = case.op
    made = plan(collective, vectors, comm, algorithm=algorithm, **arguments)
    made()
    right, tolerance = expected(collective, case, counts, root)
    whole = collective != "reduce_scatter"
    span = slice(None) if whole else part(case.size, comm.rank, comm.size)
    results = [vector.get() for vector in vectors]
    faults = [
        f"{case} vector {k}"
        for k, result in enumerate(results)
        if (np.abs(result - right) > tolerance)[span].any()
    ]
    return made.algorithm, digest(results[0][span]), "; ".join(faults)


def _cases(collective: str) -> List[Case]:
    ops = OPERATION_NAMES if collective == "allreduce" else ("sum",)
    return [Case(size, d, op, "device") for size in SIZES for d in DTYPES for op in ops]


def _ranks(collective: str, algorithm: str, counts: Tuple[int, ...]) -> List[Tuple[str, int, str]]:
    from gluon_esgd import world

    comm = world().comm
    return [_make(comm, collective, algorithm, case, counts) for case in _cases(collective)]


def _check(results: List[List[Tuple[str, int, str]]], taken: str, alike: bool = True) -> None:
    assert not [fault for rank in results for _, _, fault in rank if fault]
    assert {name for rank in results for name, _, _ in rank} == {taken}
    for same in zip(*results):
        assert not alike or len({bits for _, bits, _ in same}) == 1


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("algorithm", ["cuda", "host_staged"])
def test_one_process(algorithm: str, count: int) -> None:
    comm = Communicator()
    results = [_make(comm, "allreduce", algorithm, c, (count,)) for c in _cases("allreduce")]
    _check([results], algorithm)


@pytest.mark.mpi
@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
@pytest.mark.parametrize("counts", [(1, 1), (2, 1)], ids=["1+1", "2+1"])
@pytest.mark.parametrize("algorithm", ["auto", "cuda", "host_staged"])
def test_two_ranks(pools: Pools, algorithm: str, counts: Tuple[int, ...], collective: str) -> None:
    results = pools.get(Shape(2)).run(_ranks, collective, algorithm, counts, timeout=110)
    _check(results, "cuda" if algorithm == "auto" else algorithm)


@pytest.mark.mpi
@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather"])
def test_parts(pools: Pools, collective: str) -> None:
    results = pools.get(Shape(2)).run(_ranks, collective, "auto", (1, 1), timeout=110)
    _check(results, "host_staged", collective == "allgather")


@pytest.mark.mpi
def test_several_machines(pools: Pools) -> None:
    results = pools.get(on_nodes(1, 1)).run(_ranks, "allreduce", "host_staged", (1, 1), timeout=110)
    _check(results, "host_staged")


@pytest.mark.mpi
@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_nccl(pools: Pools, collective: str) -> None:
    if not has_nccl():
        pytest.skip("CuPy finds no NCCL")
    if _devices() < 2:
        pytest.skip("NCCL wants a GPU for each rank")
    results = pools.get(Shape(2)).run(_ranks, collective, "nccl", (1, 1), timeout=110)
    _check(results, "nccl")


def test_nccl_in_one_process() -> None:
    if not has_nccl():
        pytest.skip("CuPy finds no NCCL")
    comm, count = Communicator(), _devices()
    results = [_make(comm, "allreduce", "nccl", c, (count,)) for c in _cases("allreduce")]
    _check([results], "nccl")


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_kernel_moves_bytes_at_the_speed_of_memory(
    dtype: str, count: int, record_property: Any
) -> None:
    """Against a copy on the device, in bytes that are read and written; 100 MB in all vectors."""
    cupy = load()
    length = 100_000_000 // np.dtype(dtype).itemsize
    vectors = [cupy.ones(length, dtype) for _ in range(count)]
    queue, target = Queue(device_of(vectors[0])), cupy.empty(length, dtype)
    places = [address(v) for v in vectors]
    nbytes = vectors[0].nbytes
    launch = Launch(reducing(dtype, OPERATIONS["max"]), places, places, length, queue)
    own = _seconds(queue, launch)
    copy = _seconds(queue, lambda: queue.copy(address(target), places[0], nbytes))
    share = (2 * count * nbytes / own) / (2 * nbytes / copy)
    record_property("share_of_copy", share)
    print(f"{dtype} x {count}: {2e-9 * count * nbytes / own:.0f} GB/s, {share:.2f} of a copy")
    assert share > 0.85


def _seconds(queue: Queue, start: Any) -> float:
    """The median of eleven runs, by events of the device."""
    cuda, times = load().cuda, []
    for _ in range(13):
        with queue.current():
            begin, end = cuda.Event(), cuda.Event()
            begin.record()
        start()
        with queue.current():
            end.record()
        wait([end], Communicator(), "a measurement")
        times.append(cuda.get_elapsed_time(begin, end) / 1e3)
    return float(np.median(times[2:]))
