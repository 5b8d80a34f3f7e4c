"""Vectors that all ranks of a machine map: order of the sum, life of the memory, lack of it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest

from gluon_esgd.collectives import allreduce, plan, shared_array
from gluon_esgd.collectives.registry import COLLECTIVES

from ..pool import OPEN_MPI_PYTHON, ROOT, Ended, Pools, Shape, environment, run_once
from .expectations import (
    ALGORITHMS,
    REDUCTIONS,
    Case,
    attempt,
    faults_of,
    memory,
    name_of,
    on_nodes,
)

MIB = 1 << 20


def _rows(size: int, dtype: str, n: int) -> List[np.ndarray]:
    return [(np.random.RandomState(r).randn(size) * 10.0**r).astype(dtype) for r in range(n)]


def _ordered(dtype: str, where: str, op: str) -> List[str]:
    """Sums of one size, and of slices of the same vectors, against one loop over the ranks."""
    from gluon_esgd import world

    comm, wrong = world().comm, []
    rows = _rows((1 << 18) + 3, dtype, comm.size)
    total = rows[0].astype(np.float32 if dtype == "float16" else dtype)
    for row in rows[1:]:
        total += row
    if op == "mean":
        total /= total.dtype.type(comm.size)
    right = total.astype(dtype)
    for cut in (slice(None), slice(1, None), slice(777, 2000), slice(5, 6), slice(0, 150_001)):
        length = len(right[cut])
        room = memory(Case(length, dtype, op, where), 1, comm)[0]
        room[:] = rows[comm.rank][cut]
        plan("allreduce", room, comm, op=op, algorithm="shared")()
        if room.tobytes() != right[cut].tobytes():
            wrong.append(f"{cut}: {(room != right[cut]).sum()} differ")
    return wrong


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["private", "shared"])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [Shape(3), Shape(4)], ids=name_of)
def test_shared_adds_in_the_order_of_ranks_wherever_parts_are_cut(
    pools: Pools, shape: Shape, dtype: str, op: str, where: str
) -> None:
    assert pools.get(shape).run(_ordered, dtype, where, op) == [[]] * shape.workers


def _fresh(size: int, dtype: str) -> Tuple[bool, int, List[float]]:
    from gluon_esgd import world

    comm = world().comm
    array = shared_array(size, dtype, comm)
    zero = not array.any() and array.dtype == dtype and array.flags.c_contiguous
    array += comm.rank + 1
    allreduce(array, comm)
    return zero, array.size, sorted(set(array.tolist()))


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(1), Shape(3), on_nodes(2, 1)], ids=name_of)
def test_shared_arrays_are_zeros_of_their_own(pools: Pools, shape: Shape) -> None:
    total = sum(range(1, shape.workers + 1))
    for size in (0, 1, 1000, 5000):
        for dtype in ("float16", "int64"):
            said = pools.get(shape).run(_fresh, size, dtype)
            assert said == [(True, size, [float(total)] if size else [])] * shape.workers


def _where_vectors_lie() -> List[Any]:
    """Whether results are right where ranks bring vectors from different places."""
    from gluon_esgd import world

    comm, control, results = world().comm, world().control, []
    a = shared_array(100, np.float32, comm)
    b = shared_array(100, np.float32, comm)

    def result(array: np.ndarray) -> float:
        array[:] = comm.rank + 1
        allreduce(array, comm)
        return float(array.min()) if array.min() == array.max() else float("nan")

    results.append(result(a[comm.rank : comm.rank + 10]))  # another place on each rank
    results.append(result(a if comm.rank else b))  # another array on rank 0
    results.append(result(a if comm.rank else np.empty(100, np.float32)))  # or a private one
    results.append(result(a.reshape(2, 50)[1]))  # a view of a view
    c = shared_array(100, np.float32, control)
    results.append(result(c))  # memory of another communicator
    return results


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(3), on_nodes(2, 1)], ids=name_of)
def test_vectors_may_lie_elsewhere_on_other_ranks(pools: Pools, shape: Shape) -> None:
    assert pools.get(shape).run(_where_vectors_lie) == [[6.0] * 5] * 3


def _two_communicators() -> float:
    """Rank 0 brings memory of one communicator, the others that of another."""
    from gluon_esgd import world

    comm, control = world().comm, world().control
    a, b = shared_array(100, np.float32, comm), shared_array(100, np.float32, control)
    mine = b if comm.rank else a
    mine[:] = comm.rank + 1
    allreduce(mine, comm)
    return float(mine.max())


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(3)], ids=name_of)
def test_memory_of_two_communicators_is_not_taken_for_the_same(pools: Pools, shape: Shape) -> None:
    assert pools.get(shape).run(_two_communicators) == [6.0] * 3


def _own_files() -> List[str]:
    """The files of the library's name that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(None, 5)[5] for line in lines if "gluon_esgd_" in line]


def _mapped() -> List[str]:
    from gluon_esgd import world

    array = shared_array(1000, np.float32, world().comm)
    allreduce(array, world().comm)
    return _own_files() if array.size else []


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2), Shape(3, python=OPEN_MPI_PYTHON)], ids=name_of)
def test_files_are_unlinked_while_they_are_used(pools: Pools, shape: Shape) -> None:
    for files in pools.get(shape).run(_mapped):
        assert len(files) >= 2, "the roll call and the array"
        assert all(file.endswith("(deleted)") for file in files)


def _held() -> Tuple[int, int]:
    """How many files of ours this process has mapped or open, and its shared memory in bytes.

    Python keeps a mapped file open, so that each counts twice. What is unlinked, and no process
    maps or has open any more, is free.
    """
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors()]
    files = [*_own_files(), *(path for path in opened if "gluon_esgd_" in path)]
    status = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in status if line.startswith("RssShmem"))
    return len(files), int(kilobytes) * 1024


def _descriptors() -> List[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def _given_back(nbytes: int) -> List[Tuple[int, int]]:
    """What this process holds before, with a vector that is used, with a slice, and without."""
    from gluon_esgd import world

    comm, seen = world().comm, []

    def look() -> None:
        comm.barrier()
        seen.append(_held())
        comm.barrier()

    gc.collect()  # what earlier tests left is not this one's
    look()
    array = shared_array(nbytes // 4, np.float32, comm)
    kept = array[1:]
    made = plan("allreduce", array, comm)
    made()
    look()
    del array, made
    gc.collect()
    look()  # a slice still lies in it
    del kept
    gc.collect()
    look()
    return seen


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=name_of)
def test_memory_is_given_back_with_its_last_array(pools: Pools, shape: Shape) -> None:
    nbytes = 128 * MIB
    for before, used, sliced, after in pools.get(shape).run(_given_back, nbytes):
        assert [held[0] - before[0] for held in (used, sliced, after)] == [2, 2, 0]
        assert used[1] - before[1] > 0.9 * nbytes, "it reads its part of all vectors"
        assert after[1] - before[1] < 0.1 * nbytes


def _none_left(nbytes: int) -> int:
    """How much more this process has of shared memory after many arrays and plans."""
    from gluon_esgd import world

    comm = world().comm
    before = 0
    for turn in range(12):
        array = shared_array(nbytes // 4, np.float32, comm)
        array[:] = 1
        allreduce(array, comm)
        del array
        if turn == 1:
            before = _held()[1]
    return _held()[1] - before


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=name_of)
def test_many_arrays_leave_nothing(pools: Pools, shape: Shape) -> None:
    nbytes = 16 * MIB
    assert max(pools.get(shape).run(_none_left, nbytes)) < nbytes


# In place of /dev/shm, for one job only; what lies there at the end is listed behind its output.
SIZED = 'mount -t tmpfs -o size="$SHM" tmpfs /dev/shm'
READ_ONLY = "mount -t tmpfs -o ro tmpfs /dev/shm"
MISSING = """
mount -t tmpfs tmpfs "$EMPTY"
for name in null zero full random urandom tty; do
    touch "$EMPTY/$name"
    mount --bind "/dev/$name" "$EMPTY/$name"
done
mkdir "$EMPTY/pts"
mount --rbind /dev/pts "$EMPTY/pts"
ln -s pts/ptmx "$EMPTY/ptmx"
ln -s /proc/self/fd "$EMPTY/fd"
mount --rbind "$EMPTY" /dev
"""
UNSHARED = ["unshare", "--mount", "sh", "-c"]
RUN = '\n"$@"\ncode=$?\necho left: $(ls -A /dev/shm)\nexit $code'


def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARED, READ_ONLY], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def _mounts() -> None:
    if not _may_mount():
        pytest.skip("mounting another /dev/shm for a job is not permitted here")


def _run_with(mounted: str, shape: Shape, call: str, shm: str = "") -> Ended:
    """Run ``call()`` of this module on every rank of a job that sees another /dev/shm."""
    code = f"from {__name__} import {call} as f; f()"
    with tempfile.TemporaryDirectory(prefix="dev-") as empty:
        start = time.monotonic()
        done = subprocess.run(
            [*UNSHARED, f"set -e\n{mounted}\nset +e{RUN}", "sh", *shape.command(["-c", code], "")],
            cwd=ROOT,
            env=environment(SHM=shm, EMPTY=empty, **dict(shape.settings)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        output = done.stdout.decode(errors="replace")
        return Ended(done.returncode, output, time.monotonic() - start)


def _all_collectives() -> None:
    """Make every collective by every algorithm; rank 0 prints how many, and what was wrong."""
    from gluon_esgd import world

    comm = world().comm
    cases = [Case(1000, "float16", "sum", "shared"), Case(300_000, "float32", "mean", "private")]
    results = [
        attempt(collective, algorithm, case, (1,) * comm.size, comm)
        for collective in COLLECTIVES
        for algorithm in ALGORITHMS[collective]
        for case in (
            case._replace(op="sum") if collective not in REDUCTIONS else case for case in cases
        )
        if algorithm != "local" and (algorithm != "shared" or len(comm.nodes) == 1)
    ]
    everybody = [[tuple(r) for r in rank] for rank in comm.allgather(results)]
    if comm.rank == 0:
        print(f"made {len(results)}, wrong: {faults_of(everybody)}\n", end="", flush=True)


def _made(several_nodes: bool) -> int:
    allowed = [
        name
        for collective in COLLECTIVES
        for name in ALGORITHMS[collective]
        if name != "local" and not (several_nodes and name == "shared")
    ]
    return 2 * len(allowed)


OPEN_MPI = Shape(3, python=OPEN_MPI_PYTHON)
TWO_NODES = on_nodes(2, 1)._replace(python=OPEN_MPI_PYTHON)
# MPICH itself needs some of it; Open MPI then does without.
LACKING = {
    "5 MiB, MPICH": (SIZED, Shape(3), "5m"),
    "1 MiB": (SIZED, OPEN_MPI, "1m"),
    "4 KiB": (SIZED, OPEN_MPI, "4k"),
    "read-only": (READ_ONLY, OPEN_MPI, ""),
    "read-only on two nodes": (READ_ONLY, TWO_NODES, ""),
    "missing": (MISSING, OPEN_MPI, ""),
}


@pytest.fixture(scope="module")
def without(_mounts: None) -> Iterator[Dict[str, Future[Ended]]]:
    """How jobs of `LACKING` end, started together, as they mostly wait for their start."""
    with ThreadPoolExecutor(3) as pool:
        yield {
            name: pool.submit(_run_with, mounted, shape, "_all_collectives", shm)
            for name, (mounted, shape, shm) in LACKING.items()
        }


@pytest.mark.mpi
@pytest.mark.parametrize("lacking", LACKING)
def test_without_shared_memory_messages_do_with_one_warning_of_each_machine(
    without: Dict[str, Future[Ended]], lacking: str
) -> None:
    nodes = 2 if LACKING[lacking][1] == TWO_NODES else 1
    code, output, _ = without[lacking].result(100)
    assert f"made {_made(nodes > 1)}, wrong: []" in output, output
    assert code == 0, output
    warnings = [line for line in output.splitlines() if "no shared memory in /dev/shm" in line]
    assert len(warnings) == nodes, output
    for line in warnings:
        assert "copied or sent instead" in line and "docker run --shm-size" in line


@pytest.mark.mpi
@pytest.mark.usefixtures("_mounts")
def test_with_room_enough_nothing_is_said() -> None:
    code, output, _ = _run_with(SIZED, Shape(3), "_all_collectives", "200m")
    assert f"made {_made(False)}, wrong: []" in output and code == 0, output
    assert "no shared memory" not in output and "left:\n" in output


def _killed_in_the_middle() -> None:
    """Every rank is killed while all make collectives, as fast as they can."""
    from gluon_esgd import world

    comm = world().comm
    array = shared_array(MIB, np.float32, comm)
    private = np.ones(MIB, np.float32)
    plans = [plan("allreduce", vector, comm) for vector in (array, private)]
    pids = comm.allgather(os.getpid())
    turns = 0

    def kill() -> None:
        print(f"killed after {turns} turns\n", end="", flush=True)
        for pid in [*pids[1:], pids[0]]:
            os.kill(pid, signal.SIGKILL)

    if comm.rank == 0:
        threading.Timer(0.3, kill).start()
    while True:
        for made in plans:
            made()
        turns += 1


@pytest.mark.mpi
@pytest.mark.usefixtures("_mounts")
@pytest.mark.parametrize("job", [Shape(3), OPEN_MPI], ids=name_of)
def test_nothing_of_ours_is_left_when_all_ranks_are_killed(job: Shape) -> None:
    code, output, _ = _run_with(SIZED, job, "_killed_in_the_middle", "200m")
    said = next(line for line in output.splitlines() if line.startswith("killed after"))
    assert code != 0 and int(said.split()[2]) > 0, output
    left = next(line for line in output.splitlines() if line.startswith("left:"))
    assert "gluon_esgd_" not in left


def _ends() -> None:
    from gluon_esgd import world

    array = shared_array(1000, np.float32, world().comm)
    allreduce(array, world().comm)


@pytest.mark.mpi
def test_a_job_with_arrays_at_its_end_says_nothing() -> None:
    assert run_once(Shape(2), _ends)[:2] == (0, "")
