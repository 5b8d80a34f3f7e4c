import gzip
import struct

import numpy as np
import pytest

from gluon_esgd.data import read_idx

CODES = {"u1": 0x08, "i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}


def idx(array, code):
    head = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    return head + array.tobytes()


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 5), (0, 3)])
@pytest.mark.parametrize("packed", [False, True])
def test_every_type_comes_back(tmp_path, kind, shape, packed):
    array = np.arange(np.prod(shape)).reshape(shape).astype(kind)
    raw = idx(array, CODES[kind])
    path = tmp_path / "file"  # the content decides, not the name
    path.write_bytes(gzip.compress(raw) if packed else raw)
    back = read_idx(path)
    assert back.dtype.isnative and back.dtype == array.dtype.newbyteorder("=")
    assert back.flags.writeable
    np.testing.assert_array_equal(back, array)


GOOD = idx(np.arange(6, dtype="u1").reshape(2, 3), 0x08)


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"", "not an IDX file: it starts with nothing"),
        (b"P5 28 28", "not an IDX file: it starts with 50352032"),
        (b"\0\0\x07\x01" + GOOD[4:], "not an IDX file"),
        (b"\0\0\x08\x00", "not an IDX file"),
        (GOOD[:9], "truncated in its header of 12 bytes"),
        (GOOD[:-1], r"truncated: 17 bytes, its header \(2, 3\) asks for 18"),
        (GOOD + b"!", "too long: 19 bytes"),
        (gzip.compress(GOOD)[:-9], "broken gzip file"),
        (gzip.compress(GOOD)[:-8] + b"12345678", "broken gzip file"),
        (b"\x1f\x8b" + b"nonsense" * 4, "broken gzip file"),
        (struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3), "truncated"),
    ],
)
def test_broken_files_are_named(tmp_path, raw, message):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message) as error:
        read_idx(str(path))
    assert str(error.value).startswith(str(path))
