"""Folders of pictures, one for each class: what lies in them."""

from __future__ import annotations

import hashlib
import os
from array import array
from dataclasses import dataclass, replace
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np

__all__ = ["Listing", "Pictures", "list_folder", "listed", "shown"]

# Of what MXNet or, with resizing, Pillow can decode. What MXNet cannot is told as a broken
# picture: left out without a word it would be missed only when accuracy is.
_DECODED = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".tif", ".tiff")
_SUFFIXES = (*_DECODED, ".webp", ".gif", ".ppm", ".pgm")
_TRAIN, _VAL = "train", "val"
_SHOWN = 20


@dataclass(frozen=True)
class Pictures:
    """The pictures of one set, class by class.

    Attributes
    ----------
    root : str
        The folder that holds the class folders.
    paths : list of str
        Below `root`.
    labels : ndarray of int32, shape (pictures,)
    sizes, stamps : ndarray of int64, shape (pictures,)
        Bytes, and nanoseconds of the last change; -1 where the file cannot be looked at.
    """

    root: str
    paths: List[str]
    labels: np.ndarray
    sizes: np.ndarray
    stamps: np.ndarray

    def take(self, which: np.ndarray) -> Pictures:
        """Return some of the pictures, in the order of `which`."""
        paths = [self.paths[i] for i in which]
        parts = (numbers[which] for numbers in (self.labels, self.sizes, self.stamps))
        return Pictures(self.root, paths, *parts)

    def digest(self) -> str:
        """Return a text that is another one as soon as any of this is."""
        total = hashlib.sha256()
        for path in self.paths:
            total.update(os.fsencode(path) + b"\0")
        for numbers in (self.labels, self.sizes, self.stamps):
            total.update(numbers.tobytes())
        return total.hexdigest()


@dataclass(frozen=True)
class Listing:
    """What lies in a folder of pictures.

    Attributes
    ----------
    classes : list of str
        The names of the class folders, sorted; a label is a place in this list.
    train : Pictures
    val : Pictures, optional
    ignored : list of str
        Paths of files that are no pictures, or lie in no class folder.
    """

    classes: List[str]
    train: Pictures
    val: Optional[Pictures]
    ignored: List[str]


def list_folder(folder: str, validation: Optional[float] = None, seed: int = 0) -> Listing:
    """Look through `folder`; labels are places in the sorted names of its class folders.

    Parameters
    ----------
    folder : str
        Holds ``train/`` and perhaps ``val/`` of class folders, or class folders. Links are
        followed; what is hidden is not looked at.
    validation : float, optional
        The share of each class that goes into `val`, where there is no ``val/``.
    seed : int
        Which pictures go there.

    Raises
    ------
    OSError
        A folder cannot be read.
    ValueError
        It is not laid out so; says what to do.
    """
    root, val_root = _roots(folder)
    if val_root is not None and validation is not None:
        raise ValueError(
            f"validation={validation!r}: {shown(val_root)} is there already; leave it out, or "
            f"name {shown(root)} as the folder"
        )
    ignored = _files(folder) if root != folder else []
    classes = _classes(root)
    train = _pictures(root, classes, ignored)
    for name, count in zip(classes, np.bincount(train.labels, minlength=len(classes))):
        if not count:
            raise ValueError(
                f"{shown(os.path.join(root, name))} holds no picture ({' '.join(_SUFFIXES)}): "
                "every folder is a class; fill it or remove it"
            )
    listing = Listing(classes, train, None, ignored)
    if val_root is not None:
        return replace(listing, val=_val(val_root, root, classes, ignored))
    return listing if validation is None else _split(listing, validation, seed)


def listed(pictures: Sequence[Tuple[str, str]]) -> str:
    """Return a line for each path and what is wrong with it, of the first twenty."""
    lines = [f"{shown(path)}: {why}" for path, why in pictures[:_SHOWN]]
    lines += [f"and {len(pictures) - _SHOWN} more"] if pictures[_SHOWN:] else []
    return "".join(f"\n  - {line}" for line in lines)


def shown(path: str) -> str:
    """Return `path` for a message or a line of a file: quoted where it would spoil it."""
    return path if path.isprintable() else ascii(path)


def _roots(folder: str) -> Tuple[str, Optional[str]]:
    """Return the folders that hold the class folders; the second where there is ``val/``."""
    train, val = os.path.join(folder, _TRAIN), os.path.join(folder, _VAL)
    if os.path.isdir(train) and os.path.isdir(val):
        return train, val
    if os.path.isdir(train) and _folders(train):  # else a class of that name
        return train, None
    return folder, None


def _classes(root: str) -> List[str]:
    names = _folders(root)
    if not names:
        there = len(_files(root))
        raise ValueError(
            f"{shown(root)} holds no folders, but {there} file(s): each class must be a folder "
            "with its pictures, by the name of the class"
        )
    for name in names:
        if len(name.splitlines()) != 1:
            raise ValueError(
                f"{shown(os.path.join(root, name))} has a line break in its name: rename it, "
                "classes.txt has one class a line"
            )
    return names


def _val(root: str, train: str, classes: List[str], ignored: List[str]) -> Pictures:
    foreign = sorted(set(_folders(root)) - set(classes))
    if foreign:
        more = f" and {len(foreign) - 1} more" if foreign[1:] else ""
        raise ValueError(
            f"{shown(os.path.join(root, foreign[0]))}{more}: {shown(train)} has no class of that "
            "name; rename the folder, or remove it"
        )
    pictures = _pictures(root, classes, ignored)
    if not pictures.paths:
        raise ValueError(
            f"{shown(root)} holds no picture in a class folder, but {len(_files(root))} file(s): "
            "move each picture into the folder of its class, as in train"
        )
    return pictures


def _pictures(root: str, classes: List[str], ignored: List[str]) -> Pictures:
    ignored += _files(root)
    paths: List[str] = []
    labels, sizes, stamps = array("q"), array("q"), array("q")
    there, skip = set(_folders(root)), len(os.path.join(root, ""))
    above = (_identity(root),)
    for label, name in enumerate(classes):
        for entry in _walk(os.path.join(root, name), ignored, above) if name in there else ():
            size, stamp = _look(entry)
            paths.append(entry.path[skip:])
            labels.append(label)
            sizes.append(size)
            stamps.append(stamp)
    numbers = np.array(sizes, np.int64), np.array(stamps, np.int64)
    return Pictures(root, paths, np.array(labels, np.int32), *numbers)


def _walk(
    folder: str, ignored: List[str], above: Tuple[Tuple[int, int], ...]
) -> Iterator[os.DirEntry[str]]:
    """Yield the pictures in `folder` and in folders inside it, in the order of their names."""
    me = _identity(folder)
    if me in above:
        raise ValueError(
            f"{shown(folder)} is, by a link, a folder that it lies in: remove the link"
        )
    for entry in _entries(folder):
        if _is_folder(entry):
            yield from _walk(entry.path, ignored, (*above, me))
        elif entry.name.lower().endswith(_SUFFIXES):
            yield entry
        else:
            ignored.append(entry.path)


def _identity(folder: str) -> Tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _look(entry: os.DirEntry[str]) -> Tuple[int, int]:
    try:
        status = entry.stat()
    except OSError:  # whoever opens it will say why
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _entries(folder: str) -> List[os.DirEntry[str]]:
    """Return what is not hidden in `folder`, sorted by name."""
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if not entry.name.startswith(".")]
    return sorted(found, key=lambda entry: entry.name)


def _folders(folder: str) -> List[str]:
    return [entry.name for entry in _entries(folder) if _is_folder(entry)]


def _files(folder: str) -> List[str]:
    return [entry.path for entry in _entries(folder) if not _is_folder(entry)]


def _split(listing: Listing, share: float, seed: int) -> Listing:
    """Move a share of each class into `val`; one picture of each at least stays."""
    every, val = listing.train, np.zeros(len(listing.train.paths), bool)
    ends = np.cumsum(np.bincount(every.labels))  # classes follow one another
    for label, mine in enumerate(np.split(np.arange(len(val)), ends[:-1])):
        count = min(len(mine) - 1, int(len(mine) * share + 0.5))
        val[np.random.RandomState([seed, label]).permutation(mine)[:count]] = True
    if not val.any():
        raise ValueError(
            f"validation={share!r} of the classes of {shown(every.root)} is less than one picture "
            "in each: give a larger share"
        )
    train, rest = np.flatnonzero(~val), np.flatnonzero(val)
    return replace(listing, train=every.take(train), val=every.take(rest))
