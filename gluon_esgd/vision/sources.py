"""Pictures to train on: which kind of data a folder holds."""

from __future__ import annotations

import os
from typing import Callable, Optional, Tuple

from ..topology import world
from .folder_source import has_class_folders, open_folders
from .idx_source import open_idx
from .pictures import Augmentation, PictureData, Reading, reading_threads
from .record_source import has_records, open_records
from .synthetic_source import open_synthetic
from .together import raise_on_all

__all__ = ["open_pictures"]

_WHAT = "a look at the data"


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
        That decode, in each rank; of records MXNet takes at most half of the cores that the rank
        may use. All of the rank's unless given.
    augmentation : Augmentation, optional
        Of records and class folders; that of reference recipes for ImageNet unless given.
    synthetic : tuple of int, optional
        Pictures of an epoch, and classes: noise in place of a folder.

    Raises
    ------
    OSError, ValueError
        On all ranks of the client: nothing is there, a file is broken (which, and where), or too
        small for so many workers, or ranks find different files (who, and which).
    """
    if synthetic is not None:
        return open_synthetic(synthetic, batch_size, image_size)
    if folder is None:
        return _opened(lambda: open_idx(None, batch_size, seed))
    how = Reading(
        batch_size,
        image_size,
        seed,
        threads or reading_threads(),
        augmentation or Augmentation(),
    )
    kind = _kind(folder)
    if kind == "records":
        return open_records(folder, how)
    if kind == "class folders":
        return open_folders(folder, how)
    return _opened(lambda: open_idx(folder, batch_size, seed))


def _kind(folder: str) -> str:
    """Say what `folder` holds, the same on all ranks; collective in the client."""
    kind, failure = "IDX files", None
    if has_records(folder):
        kind = "records"
    elif has_class_folders(folder):
        kind = "class folders"
    elif os.path.isdir(folder) and any(entry.is_dir() for entry in os.scandir(folder)):
        failure = ValueError(
            f"{folder!r} has folders, but not both train/ and val/: "
            f"gluon-esgd data {folder} --to DIR --validation 0.1 makes records of class folders"
        )
    kinds = world().allgather(kind, _WHAT)
    raise_on_all(world(), failure, _WHAT)
    other = next((rank for rank, theirs in enumerate(kinds) if theirs != kinds[0]), None)
    if other is not None:
        raise ValueError(
            f"ranks see different data in {folder!r}: {kinds[0]} on rank 0, {kinds[other]} on rank "
            f"{other}; give all ranks the same files"
        )
    return kind


def _opened(open_: Callable[[], PictureData]) -> PictureData:
    """Return what `open_` does; what it raises is raised on all ranks of the client."""
    opened, failure = None, None
    try:
        opened = open_()
    except (OSError, ValueError, RuntimeError) as error:
        failure = error
    raise_on_all(world(), failure, _WHAT)
    assert opened is not None
    return opened
