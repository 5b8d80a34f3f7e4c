"""Arrays of MXNet on GPUs as CuPy arrays that share their memory (DLPack)."""

from __future__ import annotations

from typing import Any, Tuple

import mxnet as mx

__all__ = ["device_view"]

_KINDS = {"cpu": 1, "gpu": 2, "cpu_pinned": 3}  # of DLPack


class _Offer:
    """An array of MXNet as CuPy asks for arrays; MXNet itself knows only the bare capsule."""

    def __init__(self, array: mx.nd.NDArray) -> None:
        self._array = array

    def __dlpack_device__(self) -> Tuple[int, int]:
        return _KINDS[self._array.context.device_type], self._array.context.device_id

    def __dlpack__(self, **_: Any) -> Any:
        # MXNet waits until nothing is pending on the array: there is no stream to hand over.
        return self._array.to_dlpack_for_write()


def device_view(array: mx.nd.NDArray) -> Any:
    """Return the memory of a dense `array` on a GPU as a flat CuPy array, without a copy.

    It waits for all that is pending on the array. So look a view up on the thread that pushes,
    never inside an engine operation that uses the array: there it waits for itself.

    Parameters
    ----------
    array : NDArray
        Of float16, float32, float64, int32 or int64.

    Returns
    -------
    cupy.ndarray, shape (array.size,)
        It keeps the memory alive, but not what the array's name stands for: an array that is
        replaced (by a cast, say) needs a new view.
    """
    import cupy

    offer = _Offer(array)
    if hasattr(cupy, "from_dlpack"):
        return cupy.from_dlpack(offer).reshape(-1)
    return cupy.fromDlpack(offer.__dlpack__()).reshape(-1)  # CuPy 9 and before
