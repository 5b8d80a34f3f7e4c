"""The kernels' arithmetic and index arithmetic, on the CPU: the same source, threads as a loop."""

from __future__ import annotations

import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import List, Optional, Sequence

import numpy as np
import pytest

from gluon_esgd.collectives.kernels import (
    _DIVISOR,
    MOST,
    _pointers,
    keeping,
    narrowing,
    reducing,
    widening,
)
from gluon_esgd.collectives.operations import DTYPES, OPERATIONS, accumulator, silence

from .kernel_library import SOURCE, compiler, misaligned, start

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")

THREADS = [(1, 1), (1, 32), (3, 7), (2, 64), (5, 1)]
LENGTHS = [*range(101), 4099, 100_003]
GUARD, ROOM = 0xA5, 64


class Vector:
    """An array that starts `offset` bytes behind a multiple of 16, with guards around it."""

    def __init__(self, values: np.ndarray, offset: int) -> None:
        memory = np.full(values.nbytes + 3 * ROOM, GUARD, np.uint8)
        begin = ROOM + (offset - memory.ctypes.data) % 16
        self._around = [memory[:begin], memory[begin + values.nbytes :]]
        self.array = memory[begin : begin + values.nbytes].view(values.dtype)
        self.array[:] = values
        assert self.address % 16 == offset or not values.size

    @property
    def address(self) -> int:
        return int(self._around[0].ctypes.data + self._around[0].size)

    @property
    def intact(self) -> bool:
        return all((part == GUARD).all() for part in self._around)


def _values(number: int, size: int, dtype: str) -> np.ndarray:
    random = np.random.RandomState(number)
    if np.dtype(dtype).kind == "f":
        return (random.randn(size) * 100).astype(dtype)
    return random.randint(-(1 << 30), 1 << 30, size).astype(dtype)


def _run(
    kernel: str,
    sources: Sequence[Vector],
    targets: Sequence[Vector],
    threads: tuple,
    divisor: Optional[float] = None,
    weight: Optional[np.ndarray] = None,
) -> None:
    pointer = 0 if weight is None else weight.ctypes.data
    divides = divisor is not None or weight is not None
    start(
        kernel,
        *threads,
        (
            _pointers([v.address for v in sources]),
            len(sources),
            _pointers([v.address for v in targets]),
            len(targets),
            targets[0].array.size,
            np.array([(divides, divisor or 0, pointer)], _DIVISOR),
        ),
    )
    assert all(v.intact for v in (*sources, *targets))


def _expected(
    vectors: Sequence[np.ndarray], op: str, divisor: Optional[float] = None
) -> np.ndarray:
    """What numpy makes of `vectors`, one after the other, in the type of the sums."""
    loud = silence()
    sums = accumulator(vectors[0].dtype)
    total = vectors[0].astype(sums)
    for vector in vectors[1:]:
        total = OPERATIONS[op].combine(total, vector.astype(sums))
    OPERATIONS[op].divide(total, divisor)
    result = total.astype(vectors[0].dtype)
    loud()
    return result


def _check(
    op: str,
    values: Sequence[np.ndarray],
    offsets: Sequence[int],
    into: Optional[Sequence[int]] = None,
    threads: tuple = (3, 7),
    divisor: Optional[float] = None,
) -> None:
    """In place where `into` gives no offsets for results elsewhere."""
    sources = [Vector(v, o) for v, o in zip(values, offsets)]
    targets = sources if into is None else [Vector(np.zeros_like(values[0]), o) for o in into]
    dtype = values[0].dtype
    _run(reducing(dtype, OPERATIONS[op]), sources, targets, threads, divisor)
    expected = _expected(values, op, divisor)
    for target in targets:
        np.testing.assert_array_equal(target.array, expected)


@pytest.mark.parametrize("op", ["sum", "min", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_and_count_with_the_bits_of_numpy(dtype: str, op: str) -> None:
    step = np.dtype(dtype).itemsize
    for number, size in enumerate(LENGTHS):
        for count in range(1, 9) if size < 101 else (2, 8):
            values = [_values(17 * number + k, size, dtype) for k in range(count)]
            common = number * step % 16
            _check(op, values, [common] * count, threads=THREADS[count % len(THREADS)])
            apart = [(k * number + k // 3) * step % 16 for k in range(count)]
            _check(op, values, apart, threads=THREADS[number % len(THREADS)])
    assert misaligned() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_alignment_of_sources_and_results(dtype: str) -> None:
    steps = range(0, 16, np.dtype(dtype).itemsize)
    for source, other, target, last in product(steps, steps[:2], steps, steps[-2:]):
        for size in (3, 40):
            values = [_values(k, size, dtype) for k in range(2)]
            _check("sum", values, [source, (source + other) % 16], [target, last])
            _check("sum", values, [source, source], [target])
    assert misaligned() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [9, 12, 13, MOST])
def test_up_to_sixteen_vectors(dtype: str, count: int) -> None:
    values = [_values(k, 501, dtype) for k in range(count)]
    _check("sum", values, [8] * count)
    _check("max", values, [8] * (count - 1) + [0])


@pytest.mark.parametrize("threads", THREADS)
def test_threads_and_length_need_not_fit(threads: tuple) -> None:
    for size in (1, 15, 16, 17, 1000):
        values = [_values(k, size, "float32") for k in range(3)]
        _check("sum", values, [4] * 3, threads=threads)
        _check("sum", values, [4, 0, 4], threads=threads)


@pytest.mark.parametrize("op", ["sum", "min", "max"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_and_inf_travel(dtype: str, op: str) -> None:
    special = np.array([np.nan, np.inf, -np.inf, 1, -1, 65504, 6e-8, 0], dtype)
    pairs = np.array(list(product(special, special, special)), dtype).T
    _check(op, [np.ascontiguousarray(row) for row in pairs], [0, 0, 0])
    _check(op, [np.ascontiguousarray(row) for row in pairs], [0, 8, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divisor", [1, 3, 8, -2, -1, 0])
def test_division_is_that_of_numpy(dtype: str, divisor: int) -> None:
    values = [_values(k, 103, dtype) for k in range(3)]
    _check("mean", values, [0] * 3, divisor=float(divisor))
    sources, sums = [Vector(v, 0) for v in values], accumulator(dtype)
    _run(f"{dtype}_sum", sources, sources, (2, 16), weight=np.array([divisor], sums))
    for source in sources:
        np.testing.assert_array_equal(source.array, _expected(values, "mean", float(divisor)))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_wrap(dtype: str) -> None:
    ends = np.iinfo(dtype)
    values = [np.array([ends.max, ends.min, ends.min], dtype), np.array([1, -1, 0], dtype)]
    _check("sum", values, [0, 0])
    _check("mean", values[:1], [0], divisor=-1.0)


def test_every_half_number_widens_and_narrows() -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide, back = Vector(np.zeros(half.size, "f"), 0), Vector(np.zeros_like(half), 0)
    _run(widening("float16", OPERATIONS["sum"]), [Vector(half, 0)], [wide], (2, 64))
    np.testing.assert_array_equal(wide.array, half.astype(np.float32))
    _run(narrowing("float16"), [wide], [back], (2, 64))
    np.testing.assert_array_equal(back.array, half)


def test_narrowing_rounds_to_even() -> None:
    """All borders between two half numbers, and their neighbours."""
    half = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float32)
    half[-1] = 65536  # what follows the largest, before it is called inf
    border = (half[1:] + half[:-1]) / 2
    near = np.concatenate(
        [border, np.nextafter(border, np.float32(0)), np.nextafter(border, np.float32(np.inf))]
    )
    wide = np.concatenate([near, -near, [np.float32(1e-30), np.float32(1e30)]]).astype(np.float32)
    narrow = Vector(np.zeros(wide.size, np.float16), 0)
    _run(narrowing("float16"), [Vector(wide, 0)], [narrow], (2, 64))
    loud = silence()
    np.testing.assert_array_equal(narrow.array.view(np.uint16), wide.astype("f2").view(np.uint16))
    loud()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_broadcast_keeps_every_bit(dtype: str) -> None:
    itemsize = np.dtype(dtype).itemsize
    bits = np.random.RandomState(0).randint(0, 256, 97 * itemsize).astype(np.uint8)
    for source, target in product(range(0, 16, itemsize), repeat=2):
        targets: List[Vector] = [Vector(np.zeros(97, dtype), o) for o in (target, target)]
        _run(keeping(itemsize), [Vector(bits.view(dtype), source)], targets, (3, 7))
        for vector in targets:
            np.testing.assert_array_equal(vector.array.view(np.uint8), bits)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_nvcc_compiles_the_file(tmp_path: Path) -> None:
    known = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True).stdout
    arch = "sm_80" if "compute_80" in known else "sm_70"
    done = subprocess.run(
        ["nvcc", f"-arch={arch}", "-std=c++14", "-Xptxas", "-v", "-c", SOURCE, "-o", "kernels.o"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    # Pointers that are read by an index known only at run time would be copied there first.
    assert set(_frames(done.stderr)) == {"0"}, done.stderr


def _frames(said: str) -> List[str]:
    return [line.split()[0] for line in said.splitlines() if "bytes stack frame" in line]
