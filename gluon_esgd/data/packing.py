"""From folders of pictures to RecordIO files, by several processes, in as many goes as it takes."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
from tqdm import tqdm

from .folders import Listing, Pictures, list_folder, listed
from .packing_folder import PackingFolder
from .picture_pool import PicturePool
from .record_writer import RecordWriter
from .share import checked_index

__all__ = ["BrokenPicturesError", "PackedFolder", "pack_folder"]

_log = logging.getLogger(__name__)

_COMMIT_S = 1.0  # what a kill costs, at most
_BATCH_PICTURES, _BATCH_BYTES = 16, 4 << 20  # of one question to a process


class BrokenPicturesError(ValueError):
    """Pictures are broken, so no files were made of the others.

    Attributes
    ----------
    pictures : list of (str, str)
        Path of each, and what is wrong.
    empty : str, optional
        The file for which no other picture is left.
    """

    def __init__(self, pictures: Sequence[Tuple[str, str]], empty: Optional[str] = None) -> None:
        self.pictures, self.empty = list(pictures), empty
        super().__init__(self.told("skip_broken"))

    def told(self, option: str) -> str:
        """Return the message, where `option` is what leaves broken pictures out."""
        what = f"mend them, or leave them out with {option}, at once"
        if self.empty is not None:
            what = f"no picture is left for {self.empty}"
        return f"{len(self.pictures)} broken picture(s): {what}:{listed(self.pictures)}"


@dataclass(frozen=True)
class PackedFolder:
    """What `pack_folder` has made.

    Attributes
    ----------
    folder : str
        Where the files are.
    classes : int
    records, bytes : dict of str to int
        Of each file, by its name without the suffix: ``train``, and ``val`` where there is one.
    left_out : list of (str, str)
        Path of each broken picture, and what is wrong.
    ignored : list of str
        Files in the folders that are no pictures of a class.
    pictures : int
        Read by this call; an interrupted one has read the others.
    seconds : float
        That this took.
    """

    folder: str
    classes: int
    records: Dict[str, int]
    bytes: Dict[str, int]
    left_out: List[Tuple[str, str]]
    ignored: List[str]
    pictures: int
    seconds: float


def pack_folder(
    folder: Union[str, os.PathLike[str]],
    to: Union[str, os.PathLike[str]],
    *,
    resize: Optional[int] = None,
    quality: int = 95,
    workers: Optional[int] = None,
    seed: int = 0,
    validation: Optional[float] = None,
    skip_broken: bool = False,
) -> PackedFolder:
    """Write the pictures of class folders into RecordIO files, each decoded once to check it.

    Writes ``train.rec`` and ``train.idx``, ``val.rec`` and ``val.idx`` where there are pictures to
    validate with, ``classes.txt`` (line by line the name of each label from 0 on) and
    ``packed.json`` (what they were made from). They appear when all is whole. The same
    call goes on where an earlier one was interrupted, from ``.parts`` in the folder `to`; the
    bytes are the same then, and for any number of workers. Not collective.

    Parameters
    ----------
    folder : str or path-like
        Holds ``train/`` and perhaps ``val/`` of class folders, or class folders. Pictures in
        folders inside a class folder are of that class.
    to : str or path-like
        For the files; is made where it is missing.
    resize : int, optional
        Make the shorter side so many pixels, as JPEG in RGB, upright by its EXIF orientation, over
        white where it is transparent. What is smaller is not enlarged; a small JPEG stays as it
        is. Needs Pillow. Unless given, files go in as they are.
    quality : int, default 95
        From 1 to 100, of these JPEG.
    workers : int, optional
        Processes; the cores that this process may use unless given.
    seed : int, default 0
        Of the order of records, and of the choice for validation.
    validation : float, optional
        The share of each class that goes into ``val.rec``, rounded; one picture at least stays in
        ``train.rec``. Only where there is no ``val/``.
    skip_broken : bool, default False
        Leave broken pictures out and list them in ``left-out.txt``.

    Raises
    ------
    BrokenPicturesError
        Names the first 20; a ValueError.
    TypeError, ValueError
        For a wrong argument or layout.
    FileExistsError
        There are such files in `to`, made from something else.
    OSError
        Something cannot be read or written; what there is is kept.
    RuntimeError
        Pillow is missing, or a process cannot be started.

    Examples
    --------
    >>> pack_folder("/data/flowers", "/data/flowers-rec", validation=0.1)    # doctest: +SKIP
    """
    source, place_path = os.fspath(folder), Path(to)
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    plan = _plan(resize, quality, workers, seed, validation)
    listing = list_folder(source, validation, seed)
    sets = {"train": listing.train, **({"val": listing.val} if listing.val else {})}
    plan["listing"] = _digest(listing)
    _check_place(place_path, sets)
    begun = time.monotonic()
    with PackingFolder(place_path, plan, listing.classes) as place:
        done = place.finished()
        if done is not None and (skip_broken or not done["left_out"]):
            _log.info("%s holds all this already: nothing to do", place_path)
            pictures = 0
        else:
            with PicturePool(workers, resize, quality) as pool:
                pictures = _pack(place, sets, pool, plan, skip_broken)
            done = place.finished()
            assert done is not None
    return PackedFolder(
        os.fspath(place_path),
        len(listing.classes),
        done["records"],
        done["bytes"],
        [(path, why) for path, why in done["left_out"]],
        listing.ignored,
        pictures,
        time.monotonic() - begun,
    )


def _plan(
    resize: Optional[int], quality: int, workers: int, seed: int, validation: Optional[float]
) -> Dict[str, Any]:
    """Check the arguments; return those that the files' bytes depend on."""
    for name, value, least, most in (
        ("resize", 1 if resize is None else resize, 1, 65535),  # JPEG's own limit
        ("quality", quality, 1, 100),
        ("workers", workers, 1, 4096),
        ("seed", seed, 0, (1 << 31) - 1),
    ):
        if not least <= checked_index(name, value) <= most:
            raise ValueError(f"{name}={value!r} must be from {least} to {most}")
    if validation is not None and not 0 < validation < 1:
        raise ValueError(f"validation={validation!r} must be more than 0 and less than 1")
    plan = {"seed": seed, "validation": validation, "resize": resize}
    return plan if resize is None else {**plan, "quality": quality, "pillow": _pillow()}


def _pillow() -> str:
    """Return Pillow's version: another one may make other JPEG."""
    try:
        import PIL
    except ImportError:
        raise RuntimeError("resize needs Pillow: pip install 'gluon-esgd[recipes]'") from None
    return str(PIL.__version__)


def _digest(listing: Listing) -> str:
    total = hashlib.sha256(json.dumps(listing.classes).encode())
    for pictures in (listing.train, listing.val):
        total.update(pictures.digest().encode() if pictures else b"none")
    return total.hexdigest()


def _check_place(to: Path, sets: Mapping[str, Pictures]) -> None:
    """Files among the classes would be a class the next time."""
    real = os.path.realpath(to)
    for pictures in sets.values():
        if real.startswith(os.path.join(os.path.realpath(pictures.root), "")):
            raise ValueError(f"to={str(to)!r} lies among the classes: name a folder elsewhere")


def _pack(
    place: PackingFolder,
    sets: Mapping[str, Pictures],
    pool: PicturePool,
    plan: Mapping[str, Any],
    skip_broken: bool,
) -> int:
    """Write all sets, let them appear; return how many pictures were read for it."""
    place.begin()
    with ExitStack() as stack:
        writers = {name: stack.enter_context(closing(place.writer(name))) for name in sets}
        rest = {name: _rest(sets[name], writers[name], plan["seed"]) for name in sets}
        place.check_space(sum(_space(r, plan["resize"]) for r in rest.values()))
        for name in sets:
            done, count = writers[name].progress.pictures, len(sets[name].paths)
            if 0 < done < count:
                _log.info("%s: goes on at picture %d of %d", name, done, count)
            try:
                _write(name, writers[name], rest[name], pool)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    error.strerror = "the disk is full: make room, the same call goes on from here"
                raise
        refused = sorted(r for writer in writers.values() for r in writer.refused)
        if refused and not skip_broken:
            raise BrokenPicturesError(refused)
        for name, writer in writers.items():
            if not writer.progress.records:
                raise BrokenPicturesError(refused, empty=f"{name}.rec")
        place.finish(writers, refused)
    return sum(len(pictures.paths) for pictures in rest.values())


def _rest(pictures: Pictures, writer: RecordWriter, seed: int) -> Pictures:
    """Return the pictures that are still to be written, in the order of their records."""
    order = np.random.RandomState(seed).permutation(len(pictures.paths))
    return pictures.take(order[writer.progress.pictures :])


def _space(pictures: Pictures, resize: Optional[int]) -> int:
    """Return about how many bytes records of them take."""
    as_they_are = int(pictures.sizes.clip(0).sum()) + 64 * len(pictures.paths)
    if resize is None:
        return as_they_are
    # Half a byte or so for a pixel at quality 95, sides of 4 to 3.
    return min(as_they_are, len(pictures.paths) * resize * resize * 2 // 3)


def _write(name: str, writer: RecordWriter, rest: Pictures, pool: PicturePool) -> None:
    """Bring one set to its end."""
    if not rest.paths:
        return
    done, labels, committed = writer.progress.pictures, iter(rest.labels), time.monotonic()
    total = done + len(rest.paths)
    with tqdm(desc=name, total=total, initial=done, unit=" pictures", disable=None) as bar:
        for paths, reads in pool.read(_batches(rest)):
            for path, read in zip(paths, reads):
                label = int(next(labels))
                if read.fault is None:
                    writer.append(label, read.image)
                else:
                    writer.refuse(path, read.fault)
                    bar.set_postfix(broken=len(writer.refused), refresh=False)
            bar.update(len(paths))
            if time.monotonic() - committed >= _COMMIT_S:
                writer.commit()
                committed = time.monotonic()
    writer.commit()


def _batches(pictures: Pictures) -> Iterator[List[str]]:
    """Yield paths, some pictures at a time: few where they are large."""
    batch: List[str] = []
    size = 0
    for path, more in zip(pictures.paths, pictures.sizes):
        if batch and (len(batch) == _BATCH_PICTURES or size + more > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(os.path.join(pictures.root, path))
        size += int(more)
    yield batch
