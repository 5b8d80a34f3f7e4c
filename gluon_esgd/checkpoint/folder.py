"""A client's folder of checkpoints: each is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
from typing import List, NamedTuple, Optional

from ..durable import sync_folder
from .content import Checkpoint, write

__all__ = ["Entry", "before", "clean", "entries", "folder_of", "folders_of", "next_path", "save"]

_NAME = re.compile(r"checkpoint-(\d+)-epoch(\d+)-batch(\d+)\.npz")
_CLIENT = re.compile(r"client\d+")
_WRITING = re.compile(r"\.checkpoint-.*\.npz\.\d+\.tmp")


class Entry(NamedTuple):
    """A checkpoint by its name.

    Attributes
    ----------
    number : int
        The newest one has the highest; no two of a folder have the same.
    epoch, batch : int
        See `Checkpoint`.
    path : str
    """

    number: int
    epoch: int
    batch: int
    path: str


def folder_of(root: str, client: int) -> str:
    """Return the folder of a client's own checkpoints."""
    return os.path.join(root, f"client{client}")


def folders_of(root: str) -> List[str]:
    """Return the folders of all clients that have one."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return [os.path.join(root, name) for name in sorted(names) if _CLIENT.fullmatch(name)]


def entries(folder: str) -> List[Entry]:
    """Return what is in `folder`, the newest first; nothing where there is no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    found = [
        Entry(int(m[1]), int(m[2]), int(m[3]), os.path.join(folder, m.string)) for m in matches
    ]
    return sorted(found, reverse=True)


def before(path: str) -> Optional[str]:
    """Return the path of the checkpoint that was written before the one at `path`."""
    match = _NAME.fullmatch(os.path.basename(path))
    if match is None:
        return None
    older = [e for e in entries(os.path.dirname(path) or ".") if e.number < int(match[1])]
    return older[0].path if older else None


def next_path(folder: str, epoch: int, batch: int) -> str:
    """Return the path of the checkpoint that comes after those in `folder`."""
    number = max((entry.number for entry in entries(folder)), default=0) + 1
    return os.path.join(folder, f"checkpoint-{number:06d}-epoch{epoch}-batch{batch}.npz")


def save(checkpoint: Checkpoint, path: str, keep: int) -> None:
    """Write `checkpoint` beside `path`, move it there, and remove all but the newest `keep`.

    Raises
    ------
    OSError
        It cannot be written; nothing of it is left.
    """
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        _make_private(folder)
        number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "wb") as file:
            write(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(beside, path)
        sync_folder(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(beside)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, path) from error
        raise
    for entry in entries(folder)[keep:]:
        with contextlib.suppress(FileNotFoundError):
            os.remove(entry.path)


def clean(folder: str) -> None:
    """Remove what writers left that were killed; while nobody writes."""
    with contextlib.suppress(FileNotFoundError):
        for name in filter(_WRITING.fullmatch, os.listdir(folder)):
            os.remove(os.path.join(folder, name))


def _make_private(folder: str) -> None:
    """Make `folder` and what it lies in, for this user only; what is there stays as it is."""
    parent = os.path.dirname(folder)
    if parent and not os.path.isdir(parent):
        _make_private(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
