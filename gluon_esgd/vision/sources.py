"""Pictures to train on: which kind of data a folder holds."""

from __future__ import annotations

import os
from typing import Optional, Tuple

from .folder_source import has_class_folders, open_folders
from .idx_source import open_idx
from .pictures import Augmentation, PictureData, Reading, reading_threads
from .record_source import has_records, open_records
from .synthetic_source import open_synthetic

__all__ = ["open_pictures"]


def open_pictures(
    folder: Optional[str] = None,
    *,
    batch_size: int,
    image_size: int = 224,
    seed: int = 0,
    threads: Optional[int] = None,
    augmentation: Optional[Augmentation] = None,
    synthetic: Optional[Tuple[int, int]] = None,
) -> PictureData:
    """Return what a training on pictures needs of its data; collective in the client.

    Parameters
    ----------
    folder : str, optional
        With ``train.rec``, ``train.idx``, ``val.rec`` and ``val.idx`` (`gluon-esgd data` makes
        them); or ``train/`` and ``val/`` of class folders; or the four IDX files of MNIST or
        Fashion-MNIST. Unless given, what `load_images` finds on the machine.
    batch_size : int
        Of each worker.
    image_size : int, default 224
        Pixels of each side, of records and class folders.
    seed : int, default 0
        The same on all workers.
    threads : int, optional
        That decode, in each rank; MXNet takes at most one less than the cores. All of the
        rank's unless given.
    augmentation : Augmentation, optional
        Of records and class folders; that of reference recipes for ImageNet unless given.
    synthetic : tuple of int, optional
        Pictures of an epoch, and classes: noise in place of a folder.

    Raises
    ------
    OSError, ValueError
        On all ranks of the client: nothing is there, a file is broken (which, and where), or too
        small for so many workers.
    """
    if synthetic is not None:
        return open_synthetic(synthetic, batch_size, image_size)
    if folder is None:
        return open_idx(None, batch_size, seed)
    how = Reading(
        batch_size,
        image_size,
        seed,
        threads or reading_threads(),
        augmentation or Augmentation(),
    )
    if has_records(folder):
        return open_records(folder, how)
    if has_class_folders(folder):
        return open_folders(folder, how)
    if os.path.isdir(folder) and any(entry.is_dir() for entry in os.scandir(folder)):
        raise ValueError(
            f"{folder!r} has folders, but not both train/ and val/: "
            f"gluon-esgd data {folder} --to DIR --validation 0.1 makes records of class folders"
        )
    return open_idx(folder, batch_size, seed)
