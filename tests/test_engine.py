"""Python functions as operations of MXNet's engine."""

from __future__ import annotations

import gc
import sys
import threading
import time
from typing import Iterator, List

import mxnet as mx
import numpy as np
import pytest

from gluon_esgd import engine
from gluon_esgd.engine import Lane, lane, view


@pytest.fixture
def fresh() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.drain()


def test_an_operation_waits_for_what_it_reads_and_holds_what_it_writes(fresh: Lane) -> None:
    source = mx.nd.ones((500, 500))
    for _ in range(10):
        source = mx.nd.dot(source, source) / 500
    target = mx.nd.zeros((500, 500))
    result = mx.nd.zeros((500, 500))
    mx.nd.waitall()
    mx.nd.dot(source, source, out=result)
    read, written = view(result), view(target)

    def copy() -> None:
        time.sleep(0.05)
        written[:] = read + 1

    fresh.push(copy, "copy", reads=[result], writes=[target])
    assert (target * 2).asnumpy().max() == pytest.approx(2 * (500 + 1))


def test_pushing_does_not_wait(fresh: Lane) -> None:
    gate = threading.Event()
    fresh.push(gate.wait, "wait")
    gate.set()  # reached only if push came back
    fresh.wait()


def test_operations_run_in_the_order_of_pushing(fresh: Lane) -> None:
    seen: List[int] = []
    for i in range(200):
        fresh.push(lambda i=i: seen.append(i), f"number {i}")
    fresh.wait()
    assert seen == list(range(200))


def test_the_first_failure_closes_the_lane(fresh: Lane) -> None:
    seen: List[int] = []
    fresh.push(lambda: seen.append(1), "good")
    fresh.push(lambda: 1 // 0, "bad")
    fresh.push(lambda: seen.append(2), "after")
    with pytest.raises(ZeroDivisionError):
        fresh.wait()
    assert seen == [1] and fresh.failed
    with pytest.raises(ZeroDivisionError):
        fresh.check()


def test_jobs_are_forgotten_when_they_have_run(fresh: Lane) -> None:
    for _ in range(50):
        fresh.push(lambda: None, "nothing")
    fresh.wait()
    mx.nd.waitall()
    assert not engine._operations


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_view_is_the_memory_and_keeps_it(dtype: str) -> None:
    array = mx.nd.ones((3, 4), dtype=dtype)
    array.wait_to_read()
    seen = view(array)
    del array
    gc.collect()
    others = [mx.nd.zeros((3, 4), dtype=dtype) for _ in range(50)]
    mx.nd.waitall()
    assert seen.dtype == dtype and seen.shape == (12,) and (seen == 1).all() and others


def test_view_of_nothing() -> None:
    assert view(mx.nd.array([])).size == 0


def test_there_is_one_lane() -> None:
    assert lane() is lane()


def test_memory_is_let_go_when_mxnet_has_lost_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the interpreter's end, which MXNet's own way of letting go does not survive."""
    memory = np.zeros(5, np.float32)
    known = sys.getrefcount(memory)
    array = mx.nd.zeros((5,))
    engine.move(array, memory)
    mx.nd.waitall()
    assert sys.getrefcount(memory) > known
    monkeypatch.setattr(mx.nd.ndarray, "ctypes", None)
    del array
    assert sys.getrefcount(memory) == known
