"""Pictures in RecordIO files, through MXNet's threaded reader."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, List, Optional

import mxnet as mx

from ..data import RecordLoader, check_records, record_shard
from ..data.record_loader import PREFETCH
from ..resume import on_leader
from ..topology import world
from .pictures import MEAN, STD, Augmentation, Batches, PictureData, reading_threads, shorter_side

__all__ = ["has_records", "open_records"]

TRAIN, VAL, CLASSES = "train.rec", "val.rec", "classes.txt"
_IMAGENET = 1000


def has_records(folder: str) -> bool:
    """Whether `folder` holds RecordIO files to train on."""
    return os.path.isfile(os.path.join(folder, TRAIN))


def open_records(
    folder: str,
    batch_size: int,
    image_size: int,
    seed: int,
    threads: Optional[int],
    augmentation: Optional[Augmentation],
) -> PictureData:
    """Return the pictures of ``train.rec`` and ``val.rec``; see `open_pictures`.

    The leader goes through the headers of both files first, except in a client that is started
    again.
    """
    train_path, val_path = (os.path.join(folder, name) for name in (TRAIN, VAL))
    if world().settings.life == 0:
        on_leader(world(), lambda: _check(train_path, val_path))
    reader = partial(
        mx.io.ImageRecordIter,
        data_shape=(3, image_size, image_size),
        preprocess_threads=threads or reading_threads(),
        verbose=False,
        **{f"mean_{colour}": mean for colour, mean in zip("rgb", MEAN)},
        **{f"std_{colour}": std for colour, std in zip("rgb", STD)},
    )
    options = (augmentation or Augmentation()).reader_options()
    train = RecordLoader(
        train_path, partial(reader, shuffle=True, **options), batch_size=batch_size, seed=seed
    )
    count, val = _validation(val_path, batch_size, partial(reader, resize=shorter_side(image_size)))
    return PictureData(
        name=os.path.basename(os.path.abspath(folder)),
        source=folder,
        num_classes=len(_classes(folder)) or _IMAGENET,
        shape=(3, image_size, image_size),
        train_count=train.shard.records,
        validation_count=count,
        train=train,
        sampler=train,
        validation=val,
    )


def _check(train_path: str, val_path: str) -> None:
    if not os.path.isfile(val_path):
        raise ValueError(
            f"{val_path} is missing: gluon-esgd data makes it beside {TRAIN}, from val/ or with "
            "--validation SHARE"
        )
    for path in (train_path, val_path):
        check_records(path)


def _classes(folder: str) -> List[str]:
    """The names of the classes, as `pack_folder` writes them; none for files of others."""
    path = os.path.join(folder, CLASSES)
    if not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()


def _validation(path: str, batch_size: int, make_reader: Any) -> Any:
    """Return how many pictures there are, and what makes this rank's batches of them."""
    me = world()
    cut = partial(record_shard, path, num_parts=me.size, part_index=me.rank)
    records = cut(batch_size=1).records
    smallest = records - (me.size - 1) * -(-records // me.size)
    shard = cut(batch_size=min(batch_size, smallest))

    def batches() -> Batches:
        return shard.each_once(make_reader(**shard.arguments, prefetch_buffer=PREFETCH))

    return records, batches
