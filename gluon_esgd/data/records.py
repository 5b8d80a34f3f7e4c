"""RecordIO files: checked before a run, and mended."""

from __future__ import annotations

import logging
import mmap
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple, Union

from ..durable import moved_to
from .decoding import image_fault
from .framing import Buffer, Fault, Scan, content, scan

__all__ = ["check_records", "copy_good_records", "index_path", "write_index"]

_log = logging.getLogger(__name__)

Path = Union[str, "os.PathLike[str]"]

_SHOWN = 20  # faults in a message
_AT_ONCE = 256  # records that wait to be decoded
_LINE = re.compile(r"([0-9]{1,18})\t([0-9]{1,18})")  # of an index


def index_path(path_rec: Path) -> str:
    """Return where the index of a file lies unless named: beside it, ending in ``.idx``."""
    return os.path.splitext(os.fspath(path_rec))[0] + ".idx"


def check_records(path_rec: Path, path_idx: Optional[Path] = None, *, decode: bool = False) -> int:
    """Look for what would end a run late: broken records, a missing or a wrong index.

    Not collective; once, before the run, is enough. Headers alone are read, so this goes at
    the speed of seeking. A flipped byte inside an image shows with `decode` only, and in a
    JPEG not always.

    Parameters
    ----------
    path_rec, path_idx : str or path-like
        The file and its index; the index is looked for beside it unless given.
    decode : bool, default False
        Decode every record as an image too, on all cores.

    Returns
    -------
    int
        The records in the file.

    Raises
    ------
    ValueError
        Names all faults, the first 20 in full: file, record and byte offset or line.
    FileNotFoundError
        If there is no `path_rec`.
    """
    path_rec, path_idx = os.fspath(path_rec), os.fspath(path_idx or index_path(path_rec))
    with _mapped(path_rec) as data:
        found = _examine(data, decode)
        faults = [f"{path_rec}: {fault}" for fault in found.faults]
        faults += [f"{path_idx}: {fault}" for fault in _index_faults(path_idx, found)]
    _raise(path_rec, faults)
    return len(found.records)


def largest_label(path_rec: Path) -> int:
    """Return the largest label of the records that the index beside a file names.

    Raises
    ------
    ValueError
        A label is an array, or no class.
    """
    path_rec, largest = os.fspath(path_rec), 0
    entries, _ = _entries(index_path(path_rec))
    with _mapped(path_rec) as data:
        for entry in entries:
            # MXNet's own header behind that of the record: a flag that counts labels, and one.
            flag, label = struct.unpack_from("<If", data, entry.offset + 8)
            if flag or label < 0 or label != int(label):
                raise ValueError(f"{path_rec}: the label of key {entry.key} is not one class")
            largest = max(largest, int(label))
    return largest


def write_index(path_rec: Path, path_idx: Optional[Path] = None) -> int:
    """Write the index of a file that has none, or a wrong one; keys are the records' numbers.

    Parameters
    ----------
    path_rec, path_idx : str or path-like
        As for `check_records`.

    Returns
    -------
    int
        The records in the file.

    Raises
    ------
    ValueError
        If a record is broken: `copy_good_records` leaves it out.
    """
    path_rec = os.fspath(path_rec)
    with _mapped(path_rec) as data:
        found = _examine(data, decode=False)
    _raise(path_rec, [f"{path_rec}: {fault}" for fault in found.faults])
    entries = [(str(number), begin) for number, begin, _ in found.records]
    _write_index(path_idx or index_path(path_rec), entries)
    return len(entries)


def copy_good_records(
    path_rec: Path, to_rec: Path, path_idx: Optional[Path] = None, *, decode: bool = False
) -> int:
    """Copy what is not broken into a new file with an index of its own, and log what is left out.

    A new index alone would not do: MXNet's readers of whole files end the process at a broken
    header, or refuse a file whose size is no multiple of four.

    Parameters
    ----------
    path_rec, path_idx : str or path-like
        As for `check_records`. Keys are kept where the index names every good record, else
        they are the numbers of the records in the old file.
    to_rec : str or path-like
        The new file, whose index comes beside it. Both appear when they are whole.
    decode : bool, default False
        Leave out too what is no image.

    Returns
    -------
    int
        The records in the new file.

    Raises
    ------
    ValueError
        If no record is good.
    """
    path_rec, to_rec = os.fspath(path_rec), os.fspath(to_rec)
    with _mapped(path_rec) as data:
        found = _examine(data, decode)
        if not found.records:
            _raise(path_rec, [f"{path_rec}: {fault}" for fault in found.faults])
        for fault in found.faults:
            _log.warning("%s: left out %s", path_rec, fault)
        keys, entries = _keys(path_idx or index_path(path_rec)), []
        names_all = all(begin in keys for _, begin, _ in found.records)
        with moved_to(to_rec, synced=False) as beside, open(beside, "wb") as file:
            for number, begin, end in found.records:
                entries.append((keys[begin] if names_all else str(number), file.tell()))
                file.write(data[begin:end])
    _write_index(index_path(to_rec), entries)
    return len(entries)


@contextmanager
def _mapped(path: str) -> Iterator[Buffer]:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # which cannot be mapped
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _examine(data: Buffer, decode: bool) -> Scan:
    if isinstance(data, mmap.mmap) and not decode:
        data.madvise(mmap.MADV_RANDOM)  # headers only: nothing that lies between is to be read
    found = scan(data)
    if not found.records and not found.faults:
        found.faults.append(Fault(0, 0, "the file is empty"))
    return _decoded(data, found) if decode else found


def _decoded(data: Buffer, found: Scan) -> Scan:
    """Return what `found` holds, with records that are no image among the faults."""

    def fault(record: Tuple[int, int, int]) -> Optional[Fault]:
        number, begin, _ = record
        what = image_fault(content(data, begin))
        return None if what is None else Fault(number, begin, what)

    faults: List[Optional[Fault]] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for begin in range(0, len(found.records), _AT_ONCE):  # so that Ctrl-C is soon heard
            faults += pool.map(fault, found.records[begin : begin + _AT_ONCE])
    good = [record for record, what in zip(found.records, faults) if what is None]
    return Scan(good, sorted([*found.faults, *(f for f in faults if f is not None)]))


class _Entry(NamedTuple):
    line: int
    key: str
    offset: int


def _entries(path_idx: str) -> Tuple[List[_Entry], List[str]]:
    """Read an index; return its entries, and what cannot be read by line."""
    entries, faults = [], []
    with open(path_idx, encoding="ascii", errors="backslashreplace") as file:
        for line, text in enumerate(file, 1):
            match = _LINE.fullmatch(text.strip())
            if match:
                entries.append(_Entry(line, match[1], int(match[2])))
            else:
                shown = f"{text.strip()!r:.60}"
                faults.append(f"line {line}: {shown} is not a key, a tab and an offset")
    return entries, faults


def _index_faults(path_idx: str, found: Scan) -> Iterator[str]:
    if not os.path.isfile(path_idx):
        yield "there is no index; write_index() makes one"
        return
    entries, faults = _entries(path_idx)
    yield from faults
    starts = {begin for _, begin, _ in found.records}
    broken = {fault.offset for fault in found.faults}  # named already
    line_of: Dict[str, int] = {}
    named: Set[int] = set()
    for line, key, offset in entries:
        if key in line_of:
            yield f"line {line}: key {key} stands in line {line_of[key]} already"
        if offset in named:
            yield f"line {line}: key {key} points at byte {offset}, as an earlier line does"
        elif offset not in starts and offset not in broken:
            yield f"line {line}: key {key} points at byte {offset}, where no record begins"
        line_of[key] = line
        named.add(offset)
    missing = [record for record in found.records if record[1] not in named]
    if missing:
        number, begin, _ = missing[0]
        yield (
            f"{len(missing)} of {len(starts)} records are not in it, the first is record "
            f"{number} at byte {begin}; write_index() makes a new one"
        )


def _keys(path_idx: Path) -> Dict[int, str]:
    """Return the key of each offset; nothing where there is no index or keys are not unique."""
    if not os.path.isfile(path_idx):
        return {}
    entries, _ = _entries(os.fspath(path_idx))
    unique = len({entry.key for entry in entries}) == len(entries)
    return {entry.offset: entry.key for entry in entries} if unique else {}


def _write_index(path_idx: Path, entries: List[Tuple[str, int]]) -> None:
    with moved_to(os.fspath(path_idx), synced=False) as beside, open(beside, "w") as file:
        file.writelines(f"{key}\t{offset}\n" for key, offset in entries)


def _raise(path_rec: str, faults: List[str]) -> None:
    if not faults:
        return
    more = len(faults) - _SHOWN
    shown = faults[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
    lines = "".join(f"\n  - {fault}" for fault in shown)
    raise ValueError(
        f"{path_rec} is not fit for a run ({len(faults)} fault(s)); copy_good_records() leaves "
        f"out what is broken:{lines}"
    )
