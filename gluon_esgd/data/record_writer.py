"""A RecordIO file that is written on after its writer was killed.

File and index grow in a folder for unfinished work. A journal beside them says how far they are
good; what follows is cut off when the next writer goes on. When all is written they are moved.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import mxnet as mx

from ..durable import sync_folder
from .framing import frame

__all__ = ["Progress", "RecordWriter", "Refused"]


class Refused(NamedTuple):
    """A picture that is no record: its path, and why not."""

    path: str
    why: str


@dataclass
class Progress:
    """How far a file is.

    Attributes
    ----------
    pictures : int
        Taken from the list, good or not.
    records : int
    rec_bytes, idx_bytes : int
        Of the file and of its index.
    """

    pictures: int = 0
    records: int = 0
    rec_bytes: int = 0
    idx_bytes: int = 0


class RecordWriter:
    """Writes ``NAME.rec`` and ``NAME.idx`` in a folder, from where an earlier one has come to.

    Parameters
    ----------
    folder : Path
        For unfinished work, on the disk of the finished.
    name : str

    Attributes
    ----------
    progress : Progress
    refused : list of Refused
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.progress = Progress()
        self.refused: List[Refused] = []
        self._rec, self._idx = folder / f"{name}.rec", folder / f"{name}.idx"
        self._journal = folder / f"{name}.journal"
        good = self._read_journal()
        self._told = len(self.refused)  # in the journal
        self._files: List[Any] = []
        if self.is_moved:
            return
        parts = (self._rec, self.progress.rec_bytes), (self._idx, self.progress.idx_bytes)
        self._files += [_open_at(*part) for part in (*parts, (self._journal, good))]

    def _read_journal(self) -> int:
        """Learn how far all is good; return how much of the journal is."""
        good = 0
        lines = self._journal.read_bytes().splitlines(True) if self._journal.exists() else []
        for line in lines:
            if not line.endswith(b"\n"):  # the writer was killed in it
                break
            entry: Dict[str, Any] = json.loads(line)
            self.refused += [Refused(*refused) for refused in entry.pop("refused")]
            self.progress = Progress(**entry)
            good += len(line)
        return good

    @property
    def is_moved(self) -> bool:
        """Whether the finished file is at its place already: then there is nothing to write."""
        return self.progress.pictures > 0 and not self._rec.exists()

    def append(self, label: int, image: bytes) -> None:
        """Add a record; its key and id are its number in the file."""
        at = self.progress
        header = mx.recordio.IRHeader(0, float(label), at.records, 0)
        record = frame(mx.recordio.pack(header, image))
        line = f"{at.records}\t{at.rec_bytes}\n".encode()
        self._files[0].write(record)
        self._files[1].write(line)
        at.pictures += 1
        at.records += 1
        at.rec_bytes += len(record)
        at.idx_bytes += len(line)

    def refuse(self, path: str, why: str) -> None:
        """Leave a picture out and note it."""
        self.progress.pictures += 1
        self.refused.append(Refused(path, why))

    def commit(self) -> None:
        """Let all that was added be there, whatever happens from now on."""
        rec, idx, journal = self._files
        _sync(rec)
        _sync(idx)
        entry = {**asdict(self.progress), "refused": self.refused[self._told :]}
        journal.write(json.dumps(entry).encode() + b"\n")
        _sync(journal)
        self._told = len(self.refused)

    def close(self) -> None:
        """Close the files; what was not committed is lost."""
        for file in self._files:
            with suppress(OSError):  # of a full disk, once more
                file.close()

    def move(self, folder: Path) -> None:
        """Move the finished files to `folder`; readers want both, so the index comes last.

        Raises
        ------
        FileExistsError
            Others of that name are there.
        """
        for path in (self._rec, self._idx):
            if path.exists():
                if (folder / path.name).exists():
                    raise FileExistsError(
                        f"{folder / path.name} has come to be there meanwhile: move it away"
                    )
                os.rename(path, folder / path.name)
                sync_folder(folder)


def _open_at(path: Path, offset: int) -> Any:
    """Open a file to be written on from `offset`, without what is behind it."""
    file = open(path, "ab")  # noqa: SIM115 -- open as long as the writer
    if file.tell() < offset:
        file.close()
        raise ValueError(
            f"{path} has {file.tell()} bytes, where its journal says {offset}: remove "
            f"{path.parent} to begin anew"
        )
    file.truncate(offset)
    return file


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
