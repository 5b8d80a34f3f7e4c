"""Arrays of MXNet as CuPy sees them; without a GPU numpy takes CuPy's part."""

from __future__ import annotations

import sys
import types
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from gluon_esgd.device_view import device_view


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_a_view_shares_its_memory_and_keeps_it_alive(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub: Any = types.ModuleType("cupy")
    stub.from_dlpack = np.from_dlpack
    monkeypatch.setitem(sys.modules, "cupy", stub)
    array = mx.nd.arange(6, dtype=dtype).reshape((2, 3))
    view = device_view(array)
    assert view.shape == (6,) and view.dtype == dtype and view.tolist() == list(range(6))
    array += 1
    array.wait_to_read()
    assert view.tolist() == list(range(1, 7))
    del array
    mx.nd.zeros((2, 3)).wait_to_read()
    assert view.tolist() == list(range(1, 7))


def test_the_protocol_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def from_dlpack(offer: Any) -> np.ndarray:
        asked.append(offer.__dlpack_device__())
        offer.__dlpack__(stream=1, max_version=(1, 0))
        return np.zeros((1, 1))

    stub: Any = types.ModuleType("cupy")
    stub.from_dlpack = from_dlpack
    monkeypatch.setitem(sys.modules, "cupy", stub)
    assert device_view(mx.nd.zeros((1, 1))).shape == (1,) and asked == [(1, 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_view_on_a_gpu(dtype: str) -> None:
    import cupy

    array = mx.nd.arange(6, dtype=dtype, ctx=mx.gpu()).reshape((2, 3))
    view = device_view(array)
    view += cupy.ones(6, dtype)
    cupy.cuda.get_current_stream().synchronize()
    assert array.asnumpy().ravel().tolist() == list(range(1, 7))
