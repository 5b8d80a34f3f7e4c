"""The framing of RecordIO files: where records begin and end, and what is wrong.

A record is a magic number, a length with three flag bits, the content, and zeros up to a
multiple of four bytes. Content that holds the magic number at such a place is cut there and
its parts are flagged as first, middle and last, so the magic number always begins a part.
"""

from __future__ import annotations

import mmap
import struct
from typing import Callable, Iterator, List, NamedTuple, Optional, Tuple, Union

__all__ = ["LARGEST", "Fault", "Scan", "content", "ends_at", "frame", "scan"]

_MAGIC = struct.pack("<I", 0xCED7230A)
_HEADER = struct.Struct("<II")
_LENGTH_BITS = 29
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
LARGEST = (1 << _LENGTH_BITS) - 1  # bytes that a part can hold
_TELL_EVERY = 1024  # records

Buffer = Union[mmap.mmap, bytes]


class Fault(NamedTuple):
    """What is wrong where: the record's number in the file, the byte offset."""

    record: int
    offset: int
    what: str

    def __str__(self) -> str:
        return f"record {self.record} at byte {self.offset}: {self.what}"


class Scan(NamedTuple):
    """What is in a file: number, begin and end of each good record, and the faults."""

    records: List[Tuple[int, int, int]]
    faults: List[Fault]


class _Part(NamedTuple):
    flag: int
    begin: int  # of the content
    length: int
    end: int


class _Broken(Exception):
    """No part can be read at an offset."""

    def __init__(self, offset: int, what: str) -> None:
        super().__init__(what)
        self.offset = offset


def scan(data: Buffer, tell: Callable[[int], object] = lambda offset: None) -> Scan:
    """Walk from header to header; after a fault go on where the next record begins.

    Where a header is lost the number of the records after it may be short by one or more.

    Parameters
    ----------
    data : mmap or bytes
        The whole file. Only headers are read, unless something is broken.
    tell : callable, optional
        Is now and then called with the offset that has been reached.
    """
    out, offset, number = Scan([], []), 0, 0
    while offset < len(data):
        if number % _TELL_EVERY == 0:
            tell(offset)
        try:
            end = list(_parts(data, offset))[-1].end
            out.records.append((number, offset, end))
        except _Broken as broken:
            out.faults.append(Fault(number, broken.offset, str(broken)))
            end = _next_record(data, offset + 1)
        offset, number = end, number + 1
    return out


def ends_at(data: Buffer, offset: int) -> Optional[int]:
    """Return where the record at `offset` ends; None where it is broken, or none begins."""
    try:
        return list(_parts(data, offset))[-1].end
    except _Broken:
        return None


def content(data: Buffer, offset: int) -> bytes:
    """Return the content of the good record at `offset`, its parts joined."""
    return _MAGIC.join(data[p.begin : p.begin + p.length] for p in _parts(data, offset))


def frame(content: bytes) -> bytes:
    """Return a record that holds `content`, the same bytes as MXNet's writer makes."""
    cuts = list(_aligned_magic(content))
    begins, ends = [0, *(cut + 4 for cut in cuts)], [*cuts, len(content)]
    flags = [_FIRST, *[_MIDDLE] * (len(cuts) - 1), _LAST] if cuts else [_WHOLE]
    pieces = []
    for flag, begin, end in zip(flags, begins, ends):
        header = _HEADER.pack(0xCED7230A, flag << _LENGTH_BITS | (end - begin))
        pieces += [header, content[begin:end]]
    return b"".join([*pieces, bytes(-len(content) % 4)])


def _aligned_magic(content: bytes) -> Iterator[int]:
    offset = content.find(_MAGIC)
    while offset >= 0:
        if offset % 4 == 0:
            yield offset
        offset = content.find(_MAGIC, offset + 1)


def _parts(data: Buffer, offset: int) -> Iterator[_Part]:
    part = _part(data, offset)
    if part.flag in (_MIDDLE, _LAST):
        raise _Broken(offset, f"it begins with flag {part.flag}, in the middle of a record")
    yield part
    while part.flag in (_FIRST, _MIDDLE):
        offset = part.end
        if offset == len(data):
            raise _Broken(offset, "truncated: its last part is missing")
        part = _part(data, offset)
        if part.flag in (_WHOLE, _FIRST):
            raise _Broken(offset, f"its last part is missing: a part with flag {part.flag} follows")
        yield part


def _part(data: Buffer, offset: int) -> _Part:
    left = len(data) - offset - _HEADER.size
    if left < 0:
        raise _Broken(offset, f"truncated: {left + 8} bytes are left for a header of 8")
    magic, word = _HEADER.unpack_from(data, offset)
    flag, length = word >> _LENGTH_BITS, word & ((1 << _LENGTH_BITS) - 1)
    begin = offset + _HEADER.size
    end = begin + (length + 3) // 4 * 4
    if magic != 0xCED7230A:
        raise _Broken(offset, f"no magic number: {magic:#010x} instead of 0xced7230a")
    if flag > _LAST:
        raise _Broken(offset, f"flag {flag} must be from 0 to 3")
    if end > len(data):
        raise _Broken(
            offset, f"truncated, or a wrong length: {length} bytes announced, {left} left"
        )
    if any(data[begin + length : end]):
        raise _Broken(offset, f"a wrong length, {length}: filled up with other bytes than zeros")
    if not _is_followed(data, begin, end):
        what = "a wrong length, or the next header is overwritten"
        raise _Broken(offset, f"{what}: no part begins at byte {end}")
    return _Part(flag, begin, length, end)


def _is_followed(data: Buffer, begin: int, end: int) -> bool:
    """Whether a part that fills ``data[begin:end]`` ends where the next one begins.

    Where no magic number follows, either this length is wrong or the next header is; it is
    the next one if nothing begins inside this part and that length leads on.
    """
    if end == len(data) or data[end : end + 4] == _MAGIC:
        return True
    if len(data) - end < _HEADER.size:
        return True  # the rest is a fault of its own
    length = _HEADER.unpack_from(data, end)[1] & ((1 << _LENGTH_BITS) - 1)
    after = end + _HEADER.size + (length + 3) // 4 * 4
    leads_on = after == len(data) or data[after : after + 4] == _MAGIC
    return leads_on and not begin <= _next_record(data, begin) < end


def _next_record(data: Buffer, offset: int) -> int:
    """Return where the first record at or after `offset` begins, or the file's end."""
    while True:
        offset = data.find(_MAGIC, offset)
        if offset < 0:
            return len(data)
        if offset % 4 == 0 and data[offset + 7 : offset + 8] < b"\x40":  # flag 0 or 1
            return offset
        offset += 1
