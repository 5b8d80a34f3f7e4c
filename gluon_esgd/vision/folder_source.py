"""Pictures as files in class folders, decoded by Gluon's loader."""

from __future__ import annotations

import os
import threading
from typing import Callable, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon.data.dataloader import default_batchify_fn

from ..data import ShardSampler
from ..data.decoding import decoded
from ..data.folders import Pictures
from ..topology import world
from .one_listing import list_alike
from .pictures import PictureData, Reading, middle, normalize

__all__ = ["has_class_folders", "open_folders"]

_Maker = Callable[[], Callable[[mx.nd.NDArray], mx.nd.NDArray]]


def has_class_folders(folder: str) -> bool:
    """Whether `folder` holds class folders to train on and to validate with."""
    return all(os.path.isdir(os.path.join(folder, name)) for name in ("train", "val"))


def open_folders(folder: str, how: Reading) -> PictureData:
    """Return the pictures below ``train/`` and ``val/``; see `open_pictures`.

    All ranks list the folders, and must find the same. Slower than records: each picture is a file
    to find, Gluon's transforms are Python, and MXNet decodes in one thread unless
    ``MXNET_CPU_WORKER_NTHREADS`` says more.
    """
    me = world()
    listing = list_alike(folder, me)
    assert listing.val is not None, "has_class_folders has looked"
    sampler = ShardSampler(len(listing.train.paths), seed=how.seed)
    part = ShardSampler(
        len(listing.val.paths),
        shuffle=False,
        last="keep",
        num_workers=me.size,
        worker_rank=me.rank,
    )

    def load(pictures: Pictures, make_cut: _Maker, sampler: ShardSampler) -> gluon.data.DataLoader:
        dataset = _Files(pictures, make_cut)
        return gluon.data.DataLoader(
            dataset,
            how.batch_size,
            sampler=sampler,
            num_workers=how.threads,
            thread_pool=True,
            batchify_fn=default_batchify_fn,  # else threads, too, take shared memory
            prefetch=2,
        )

    validation = load(listing.val, lambda: middle(how.image_size), part)
    return PictureData(
        name=os.path.basename(os.path.abspath(folder)),
        source=folder,
        num_classes=len(listing.classes),
        shape=how.shape,
        train_count=len(listing.train.paths),
        validation_count=len(listing.val.paths),
        train=load(listing.train, lambda: how.augmentation.transforms(how.image_size), sampler),
        sampler=sampler,
        validation=lambda: iter(validation),
    )


class _Files(gluon.data.Dataset):
    """Decoded files and their labels; each thread has transforms of its own, which share none."""

    def __init__(self, pictures: Pictures, make_cut: _Maker) -> None:
        self._pictures, self._make_cut = pictures, make_cut
        self._mine = threading.local()

    def __len__(self) -> int:
        return len(self._pictures.paths)

    def __getitem__(self, index: int) -> Tuple[mx.nd.NDArray, np.float32]:
        path = os.path.join(self._pictures.root, self._pictures.paths[index])
        if not hasattr(self._mine, "cut"):
            self._mine.cut = self._make_cut()
        with open(path, "rb") as file:
            image = file.read()
        try:
            picture = decoded(image)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        label = np.float32(self._pictures.labels[index])
        return normalize(self._mine.cut(picture)), label
