"""One picture on its way from a file into a record."""

from __future__ import annotations

import io
import os
import stat
from typing import Any, NamedTuple, Optional

import numpy as np

from .decoding import picture_fault, torn
from .framing import LARGEST

__all__ = ["Read", "read_picture"]

_HEADER_BYTES = 24  # MXNet's own, before the picture in a record
_ORIENTATION = 0x0112  # in EXIF; 1 is upright


class Read(NamedTuple):
    """What became of a picture: the bytes for its record, or what is wrong."""

    image: bytes
    fault: Optional[str]


def read_picture(path: str, resize: Optional[int], quality: int) -> Read:
    """Read a picture and see whether MXNet decodes it.

    Parameters
    ----------
    path : str
    resize : int, optional
        Make the shorter side so long, in pixels, as a JPEG in RGB; else the file as it is.
    quality : int
        Of that JPEG.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # a pipe would keep us waiting
            return Read(b"", "it is no regular file")
        if status.st_size > LARGEST - _HEADER_BYTES:
            return Read(b"", f"its {status.st_size} bytes are more than the 512 MiB of a record")
        with open(path, "rb") as file:
            image = file.read()
    except OSError as error:
        link = ", it is a link that leads nowhere" if os.path.islink(path) else ""
        return Read(b"", f"it cannot be read: {error.strerror}{link}")
    return _checked(image) if resize is None else _resized(image, resize, quality)


def _checked(image: bytes) -> Read:
    fault = picture_fault(image) if image else "it is empty"
    if fault is not None and _is_for_pillow(image):
        fault += " (MXNet takes JPEG, PNG, BMP and TIFF; with resize others become JPEG)"
    return Read(b"" if fault else image, fault)


def _is_for_pillow(image: bytes) -> bool:
    return image[8:12] == b"WEBP" or image[:4] == b"GIF8" or image[:2] in (b"P5", b"P6")


def _resized(image: bytes, shorter: int, quality: int) -> Read:
    from PIL import Image, UnidentifiedImageError

    fault = torn(image) if image else "it is empty"
    if fault is not None:
        return Read(b"", fault)
    try:
        with Image.open(io.BytesIO(image)) as picture:
            if _stays(picture, shorter):
                return _checked(image)
            image = _jpeg(picture, shorter, quality)
    except UnidentifiedImageError:
        return Read(b"", "no image: nothing that Pillow knows")
    except Exception as error:  # Pillow's many
        return Read(b"", f"no image: {(str(error).strip().splitlines() or [repr(error)])[-1]}")
    return _checked(image)


def _stays(picture: Any, shorter: int) -> bool:
    """Whether nothing would be gained: a plain JPEG that is small enough."""
    upright = picture.getexif().get(_ORIENTATION, 1) == 1
    return (
        picture.format == "JPEG"
        and picture.mode in ("RGB", "L")
        and upright
        and min(picture.size) <= shorter
    )


def _jpeg(picture: Any, shorter: int, quality: int) -> bytes:
    from PIL import Image, ImageOps

    # Lets the JPEG decoder leave out what is more than twice too fine: several times as fast.
    picture.draft(None, tuple(2 * side for side in _size(picture.size, shorter)))
    picture = _rgb(ImageOps.exif_transpose(picture))
    if min(picture.size) > shorter:
        picture = picture.resize(_size(picture.size, shorter), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=quality)
    return out.getvalue()


def _size(size: Any, shorter: int) -> Any:
    """Return width and height with the shorter one of `shorter` pixels."""
    least = min(size)
    return tuple(max(1, round(side * shorter / least)) for side in size)


def _rgb(picture: Any) -> Any:
    """Return the picture in RGB, over white where it is transparent."""
    from PIL import Image

    if "transparency" in picture.info or picture.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    if picture.mode.startswith("I"):  # 16 bits, of which convert would make white
        picture = Image.fromarray((np.asarray(picture) // 256).clip(0, 255).astype("u1"))
    return picture.convert("RGB")
