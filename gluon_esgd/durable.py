"""Files that are there as a whole or as they were, whenever whoever writes them is killed."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Iterator, Union

__all__ = ["moved_to", "sync_folder", "write_whole"]


def write_whole(path: Union[str, Path], content: bytes, *, synced: bool = True) -> None:
    """Write a small file in one piece; see `moved_to`."""
    with moved_to(path, synced=synced) as beside:
        beside.write_bytes(content)


@contextlib.contextmanager
def moved_to(path: Union[str, Path], *, synced: bool = True) -> Iterator[Path]:
    """Yield a name beside `path`: what is written there is moved to `path` at the end.

    Nothing is left of it where writing fails. Each writer has a name of its own: of several that
    write at the same time the last one counts.

    Parameters
    ----------
    path : str or path-like
    synced : bool, default True
        Let the file outlive a crash of the machine. It need not where living processes tell one
        another something, or where it can be made again.

    Raises
    ------
    OSError
        On this process: it cannot be written; names `path`.
    """
    path = Path(path)
    writer = f"{os.getpid()}-{threading.get_native_id()}"
    beside = path.with_name(f".{path.name}.{writer}.new")
    try:
        yield beside
        if synced:
            _sync(beside)
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        mine = (None, str(beside), beside)
        if isinstance(error, OSError) and error.errno is not None and error.filename in mine:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    if synced:
        sync_folder(path.parent)


def sync_folder(folder: Union[str, Path]) -> None:
    """Let the names of files in `folder` outlive a crash of the machine."""
    _sync(folder)


def _sync(path: Union[str, Path]) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
