"""Whether a record is an image that can be decoded."""

from __future__ import annotations

import struct
import zlib
from typing import Optional

import mxnet as mx

__all__ = ["image_fault"]

_PNG = b"\x89PNG\r\n\x1a\n"


def image_fault(record: bytes) -> Optional[str]:
    """Say why the content of a record is no image with MXNet's header; None where it is one."""
    try:
        image = mx.recordio.unpack(record)[1]
        if not image:
            return "no image: nothing after its header"
        if image[:4] == _PNG[:4] and not _is_whole_png(image):
            return "no image: a PNG with a wrong checksum"
        mx.image.imdecode(image).wait_to_read()
    except Exception as error:  # struct's, numpy's and MXNet's own
        return f"no image: {(str(error).strip().splitlines() or [repr(error)])[-1]}"
    return None


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
