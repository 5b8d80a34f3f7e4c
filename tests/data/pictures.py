"""Small RecordIO files of pictures, written by MXNet itself."""

import struct
import zlib

import mxnet as mx
import numpy as np

from gluon_esgd.data.picture import read_picture


def png(image):
    """A PNG file of an array of uint8, shape (height, width, 3): MXNet's wheel only decodes."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width = image.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def write_pictures(path_rec, count, key=lambda i: i, label=lambda i: i):
    """Write `count` pictures of 8 x 8 and more with labels 0, 1, ... or other; return offsets."""
    path = str(path_rec)
    record, offsets = mx.recordio.MXIndexedRecordIO(path[:-4] + ".idx", path, "w"), []
    random = np.random.RandomState(0)
    for i in range(count):
        image = png(random.randint(0, 255, (8 + i % 7, 8, 3)).astype("u1"))
        offsets.append(record.tell())
        record.write_idx(
            key(i), mx.recordio.pack(mx.recordio.IRHeader(0, float(label(i)), i, 0), image)
        )
    record.close()
    return offsets


class InThisProcess:
    """Reads pictures as a pool does, without the seconds that its processes take to start."""

    def __init__(self, workers, resize, quality):
        self._how = resize, quality

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def read(self, batches):
        for batch in batches:
            yield batch, [read_picture(path, *self._how) for path in batch]
