"""Small pictures in IDX files, or those that the machine has."""

from __future__ import annotations

import os
from typing import Any, List, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon

from ..data import ShardSampler, load_images
from ..topology import world
from .pictures import PictureData

__all__ = ["open_idx"]

_ENDS = ("-ubyte", "-ubyte.gz")


def open_idx(folder: Optional[str], batch_size: int, seed: int) -> PictureData:
    """Return the pictures that `load_images` finds, from 0 to 1, as they are.

    `open_pictures` comes here with all that holds neither records nor class folders.
    """
    if folder is not None:
        _check(folder)
    images, me = load_images(folder), world()
    sampler = ShardSampler(len(images.train_images), seed=seed)

    def load(x: np.ndarray, y: np.ndarray, **options: Any) -> gluon.data.DataLoader:
        dataset = gluon.data.ArrayDataset(x[:, None], y)
        return gluon.data.DataLoader(dataset, batch_size, batchify_fn=_batch, **options)

    mine = slice(me.rank, None, me.size)
    validation = load(images.test_images[mine], images.test_labels[mine])
    height, width = images.train_images.shape[1:]
    return PictureData(
        name=images.name,
        source=images.source,
        num_classes=images.num_classes,
        shape=(1, height, width),
        train_count=len(images.train_images),
        validation_count=len(images.test_images),
        train=load(images.train_images, images.train_labels, sampler=sampler),
        sampler=sampler,
        validation=lambda: iter(validation),
    )


def _check(folder: str) -> None:
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder!r}: no such folder")
    if not any(name.endswith(_ENDS) for name in os.listdir(folder)):
        raise ValueError(
            f"{folder!r} holds no pictures that can be read: neither RecordIO (train.rec, "
            "train.idx, val.rec, val.idx), nor class folders (train/, val/), nor the four IDX "
            "files of MNIST (train-images-idx3-ubyte, ...)"
        )


def _batch(samples: List[Tuple[np.ndarray, int]]) -> List[mx.nd.NDArray]:
    pictures, labels = zip(*samples)
    return [mx.nd.array(np.stack(pictures), dtype="float32") / 255, mx.nd.array(labels)]
