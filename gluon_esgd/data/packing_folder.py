"""The folder that packed files go to: what is unfinished in it, and what is not to be touched."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from ..durable import write_whole
from .folders import shown
from .packed import CLASSES, LEFT_OUT, PACKED, TRAIN, VAL, index_digest
from .record_writer import RecordWriter, Refused
from .records import index_path

__all__ = ["PackingFolder"]

_log = logging.getLogger(__name__)

_RECORDS = tuple(name for rec in (TRAIN, VAL) for name in (rec, index_path(rec)))
_LOCK = ".lock"
_NAMES = {"listing": "the pictures in the folder"}  # of what a plan holds, else the argument's


class PackingFolder:
    """The folder for finished files, with ``.parts`` for unfinished ones; a context manager.

    Parameters
    ----------
    to : Path
        Is made where it is missing.
    plan : mapping of str to object
        All that the files' bytes depend on, in JSON's types.
    classes : list of str

    Raises
    ------
    BlockingIOError
        On entry, if another process is at work in the folder.
    """

    def __init__(self, to: Path, plan: Mapping[str, Any], classes: List[str]) -> None:
        self._to, self._parts = to, to / ".parts"
        self._plan = dict(plan)
        self._classes = "".join(f"{name}\n" for name in classes).encode(errors="surrogateescape")
        self._lock = -1

    def __enter__(self) -> PackingFolder:
        self._to.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        return self

    def _take_lock(self) -> None:
        path = self._to / _LOCK
        self._lock = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise BlockingIOError(
                f"another process packs into {self._to}: wait for its end, or name another folder"
            ) from None
        except OSError:  # some network disks lock nothing
            return
        if not path.exists() or path.stat().st_ino != os.fstat(self._lock).st_ino:
            os.close(self._lock)  # its owner has just ended, and removed it
            self._take_lock()

    def __exit__(self, *exc: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._to / _LOCK).unlink()  # while it is held
        os.close(self._lock)

    def finished(self) -> Optional[Dict[str, Any]]:
        """Return what `finish` has noted if the same plan was carried out here before."""
        done = _read(self._to / PACKED)
        if done is None or any(done.get(key) != self._plan[key] for key in self._plan):
            return None
        for name, size in done["bytes"].items():
            path = self._to / f"{name}.rec"
            there = path.exists() and path.with_suffix(".idx").exists()
            if not (there and path.stat().st_size == size):
                return None
        shutil.rmtree(self._parts, ignore_errors=True)  # a kill may have left it
        return done

    def begin(self) -> None:
        """Make ready for writers: keep what is unfinished of the same plan, remove any other.

        Raises
        ------
        FileExistsError
            There are finished files that come from elsewhere.
        """
        kept = _read(self._parts / "plan.json")
        for name in _RECORDS:
            was_moved = kept == self._plan and not (self._parts / name).exists()
            if not was_moved:
                self._refuse(name)
        self._refuse(CLASSES, self._classes)
        if kept == self._plan:
            return
        if kept is not None:
            changed = [
                _NAMES.get(key, key) for key in self._plan if kept.get(key) != self._plan[key]
            ]
            _log.warning("begins anew: not the same as before are %s", ", ".join(changed))
        shutil.rmtree(self._parts, ignore_errors=True)
        self._parts.mkdir()
        write_whole(self._parts / "plan.json", json.dumps(self._plan).encode())

    def _refuse(self, name: str, but: Optional[bytes] = None) -> None:
        """Raise if a file is there, unless it says just the same."""
        path = self._to / name
        if path.exists() and (but is None or path.read_bytes() != but):
            raise FileExistsError(
                f"{path} is there, made otherwise or from other pictures: remove it, or name "
                "another folder"
            )

    def writer(self, name: str) -> RecordWriter:
        """Return the writer of ``NAME.rec``, where the last one has come to."""
        writer = RecordWriter(self._parts, name)
        if writer.is_moved and not (self._to / f"{name}.rec").exists():
            raise FileNotFoundError(
                f"{self._to / name}.rec is gone: remove {self._parts} to begin anew"
            )
        return writer

    def check_space(self, needed: int) -> None:
        """Raise OSError if there is no room for so many bytes more."""
        free = shutil.disk_usage(self._to).free
        if free < needed:
            raise OSError(
                f"{self._to} needs about {needed / 1e9:,.1f} GB more, and its disk has "
                f"{free / 1e9:,.1f} GB free: make room, or name a folder on another disk"
            )

    def finish(self, writers: Mapping[str, RecordWriter], left_out: List[Refused]) -> None:
        """Move all to its place, the training set last, and note what it was made from."""
        write_whole(self._to / CLASSES, self._classes)
        if left_out:
            lines = "".join(f"{shown(path)}\t{why}\n" for path, why in left_out)
            write_whole(self._to / LEFT_OUT, lines.encode())
        for name in sorted(writers, reverse=True):
            writers[name].move(self._to)
        index = {name: index_digest(self._to / f"{name}.idx") for name in writers}
        done = {
            **self._plan,
            "records": {name: writers[name].progress.records for name in writers},
            "bytes": {name: writers[name].progress.rec_bytes for name in writers},
            "index": index,
            "left_out": left_out,
        }
        write_whole(self._to / PACKED, json.dumps(done, indent=1).encode())
        shutil.rmtree(self._parts)


def _read(path: Path) -> Optional[Dict[str, Any]]:
    if not path.exists():
        return None
    found: Dict[str, Any] = json.loads(path.read_bytes())
    return found
