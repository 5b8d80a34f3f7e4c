"""Noise in the form of pictures: what a training takes where input takes nothing."""

from __future__ import annotations

from typing import Iterator, List, Tuple

import mxnet as mx
import numpy as np

from ..topology import world
from .pictures import Batches, PictureData

__all__ = ["open_synthetic"]


def open_synthetic(epoch: Tuple[int, int], batch_size: int, image_size: int) -> PictureData:
    """Return one batch of noise, again and again, as many as `epoch` (pictures, classes) makes."""
    count, num_classes = epoch
    me, shape = world(), (3, image_size, image_size)
    random = np.random.RandomState(me.worker_rank)
    data = mx.nd.array(random.standard_normal((batch_size, *shape)).astype(np.float32))
    label = mx.nd.array(random.randint(num_classes, size=batch_size))
    train = _Again([data, label], max(1, count // (me.num_workers * batch_size)))

    def validation() -> Batches:
        yield data, label

    return PictureData(
        name="noise",
        source="--synthetic",
        num_classes=num_classes,
        shape=shape,
        train_count=len(train) * me.num_workers * batch_size,
        validation_count=me.size * batch_size,
        train=train,
        sampler=None,
        validation=validation,
    )


class _Again:
    def __init__(self, batch: List[mx.nd.NDArray], times: int) -> None:
        self._batch, self._times, self.batch_size = batch, times, len(batch[0])

    def __len__(self) -> int:
        return self._times

    def __iter__(self) -> Iterator[List[mx.nd.NDArray]]:
        return iter([self._batch] * self._times)
