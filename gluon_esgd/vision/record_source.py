"""Pictures in RecordIO files, through MXNet's threaded reader."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import mxnet as mx

from ..data import RecordLoader, check_records, record_shard
from ..data.packed import CLASSES, TRAIN, VAL, is_as_packed
from ..data.record_loader import PREFETCH
from ..data.records import largest_label
from ..topology import world
from .pictures import MEAN, STD, Batches, PictureData, Reading, shorter_side
from .together import on_each_machine

__all__ = ["has_records", "open_records"]


def has_records(folder: str) -> bool:
    """Whether `folder` holds RecordIO files to train on."""
    return os.path.isfile(os.path.join(folder, TRAIN))


def open_records(folder: str, how: Reading) -> PictureData:
    """Return the pictures of ``train.rec`` and ``val.rec``; see `open_pictures`.

    The first rank of the client on each machine checks both files before, except in a client that
    is started again: a sample of records where they are as `pack_folder` made them, else all.
    """
    train_path, val_path = (os.path.join(folder, name) for name in (TRAIN, VAL))
    if world().settings.life == 0:
        on_each_machine(world(), lambda: _check(train_path, val_path), "the check of records")
    reader = partial(
        mx.io.ImageRecordIter,
        data_shape=how.shape,
        preprocess_threads=how.threads,
        verbose=False,
        **{f"mean_{colour}": mean for colour, mean in zip("rgb", MEAN)},
        **{f"std_{colour}": std for colour, std in zip("rgb", STD)},
    )
    vary = partial(reader, shuffle=True, **how.augmentation.reader_options())
    train = RecordLoader(train_path, vary, batch_size=how.batch_size, seed=how.seed)
    cut = partial(reader, resize=shorter_side(how.image_size))
    count, val = _validation(val_path, how.batch_size, cut)
    return PictureData(
        name=os.path.basename(os.path.abspath(folder)),
        source=folder,
        num_classes=_num_classes(folder),
        shape=how.shape,
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
        if not is_as_packed(path):
            check_records(path, progress=world().is_main)


def _num_classes(folder: str) -> int:
    """So many as `pack_folder` has written down; for files of others by what they validate with."""
    path = os.path.join(folder, CLASSES)
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            return len(file.read().splitlines())
    return 1 + largest_label(os.path.join(folder, VAL))


def _validation(path: str, batch_size: int, make_reader: Any) -> Any:
    """Return how many pictures there are, and what makes this rank's batches of them."""
    me = world()
    records = record_shard(path, batch_size=1, num_parts=1, part_index=0).records
    longest = -(-records // me.size)
    parts = -(-records // longest)  # ranks beyond them have none
    shortest = records - (parts - 1) * longest
    cut = partial(record_shard, path, batch_size=min(batch_size, shortest), num_parts=parts)
    shard = cut(part_index=min(me.rank, parts - 1))

    def batches() -> Batches:
        if me.rank >= parts:
            return iter(())
        return shard.each_once(make_reader(**shard.arguments, prefetch_buffer=PREFETCH))

    return records, batches
