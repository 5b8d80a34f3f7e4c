"""Whether a record is an image that can be decoded."""

from __future__ import annotations

import struct
import zlib
from typing import Optional

import mxnet as mx

__all__ = ["decoded", "image_fault", "picture_fault", "torn"]

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
_COMMENT = b"\xff\xfe\x00\x02"  # an empty one


def image_fault(record: bytes) -> Optional[str]:
    """Say why the content of a record is no image with MXNet's header; None where it is one."""
    try:
        image = mx.recordio.unpack(record)[1]
    except Exception as error:  # struct's and numpy's own
        return _no_image(error)
    return picture_fault(image) if image else "no image: nothing after its header"


def picture_fault(image: bytes) -> Optional[str]:
    """Say why a file's content is no image that MXNet decodes; None where it is one."""
    try:
        decoded(image)
    except ValueError as error:
        return str(error)
    return None


def decoded(image: bytes) -> mx.nd.NDArray:
    """Return a file's content as a picture of uint8, shape (height, width, 3).

    Raises
    ------
    ValueError
        It is none, or a part of it is missing: MXNet would often keep quiet.
    """
    fault = torn(image)
    if fault is not None:
        raise ValueError(fault)
    if image[:2] == _JPEG:
        # MXNet reads the size by itself where JFIF's header comes first, and then keeps quiet
        # about what the decoder refuses; with a comment in between it asks the decoder.
        image = _JPEG + _COMMENT + image[2:]
    try:
        picture = mx.image.imdecode(image)
        picture.wait_to_read()
    except Exception as error:  # MXNet's own
        raise ValueError(_no_image(error)) from None
    return picture


def torn(image: bytes) -> Optional[str]:
    """Say what is missing or changed, as far as it shows without decoding."""
    if image[:4] == _PNG[:4] and not _is_whole_png(image):
        return "no image: a PNG with a wrong checksum"
    if image[:2] == _JPEG and not _is_whole_jpeg(image):
        return "no image: a JPEG whose end is missing"
    return None


def _no_image(error: Exception) -> str:
    return f"no image: {(str(error).strip().splitlines() or [repr(error)])[-1]}"


def _is_whole_jpeg(image: bytes) -> bool:
    """Whether an end mark follows the first scan: where it lacks the decoder fills up with grey.

    Segments before the scan are stepped over, since a thumbnail in one has an end of its own.
    """
    offset = len(_JPEG)
    while True:
        offset = image.find(b"\xff", offset)
        if not 0 <= offset <= len(image) - 4:
            return False
        kind, length = struct.unpack_from(">xBH", image, offset)
        if kind in (0x00, 0xFF):  # no segment, but filling
            offset += 1
            continue
        offset += 2 + length
        if kind == 0xDA:
            return image.find(b"\xff\xd9", offset) >= 0


def _is_whole_png(image: bytes) -> bool:
    """MXNet reads the size by itself and keeps quiet where the decoder then refuses the rest."""
    kind, offset = b"", len(_PNG)
    while image[:8] == _PNG and kind != b"IEND" and offset + 12 <= len(image):
        (length,) = struct.unpack_from(">I", image, offset)
        kind, end = image[offset + 4 : offset + 8], offset + 8 + length
        if struct.pack(">I", zlib.crc32(image[offset + 4 : end])) != image[end : end + 4]:
            return False
        offset = end + 4
    return kind == b"IEND"
