"""Files that are there as a whole or as they were, whenever whoever writes them is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Union

__all__ = ["sync_folder", "write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file beside `path`, then move it there."""
    beside = path.with_name(f".{path.name}.new")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(folder: Union[str, Path]) -> None:
    """Let the names of files in `folder` outlive a crash of the machine."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
