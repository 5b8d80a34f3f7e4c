"""RecordIO files, their indices, IDX files: what readers say of damaged ones."""

from __future__ import annotations

import gzip
import struct

import mxnet as mx
import numpy as np
import pytest

from gluon_esgd.data import (
    check_records,
    copy_good_records,
    load_images,
    read_idx,
    record_shard,
    write_index,
)

from ..data.pictures import png
from .mutation import Cases, bytes_, seeds


@pytest.fixture
def records(tmp_path):
    rec, idx = tmp_path / "train.rec", tmp_path / "train.idx"
    writer = mx.recordio.MXIndexedRecordIO(str(idx), str(rec), "w")
    magic = struct.pack("<I", 0xCED7230A)
    for key in range(12):
        content = bytes(range(key * 5)) + (magic + b"abcd" + magic if key % 3 == 0 else b"")
        writer.write_idx(key, mx.recordio.pack(mx.recordio.IRHeader(0, key, key, 0), content))
    writer.close()
    return rec, idx


def test_any_record_file_is_described_or_mended(records, tmp_path):
    rec, idx = records
    good, index, out = rec.read_bytes(), idx.read_bytes(), tmp_path / "out.rec"
    cases = Cases()
    for seed, random in seeds(0, 300):
        data = bytes_(random, good, good)
        rec.write_bytes(data)
        idx.write_bytes(index)
        case = lambda: (check_records(rec), write_index(rec), check_records(rec))  # noqa: E731
        cases.ends_well(seed, data, case, [str(rec)])
        mended = lambda d=seed % 8 == 0: _mended(rec, out, d)  # noqa: E731
        cases.ends_well(seed, data, mended, [str(rec)])
    assert cases.count == 600 and cases.refused > 150


def _mended(rec, out, decode):
    kept = copy_good_records(rec, out, decode=decode)
    assert kept == check_records(out) > 0


def test_any_index_is_described(records):
    rec, idx = records
    good = idx.read_bytes()
    odd = "²\t0\n\uff11\t9\n".encode() + b"\xff\t0\n" + b"9" * 5000 + b"\t" + b"9" * 5000 + b"\n"
    cases = Cases()
    for seed, random in seeds(1000, 200):
        data = bytes_(random, good, odd)
        idx.write_bytes(data)
        cases.ends_well(seed, data, lambda: check_records(rec), [str(rec)])
        case = lambda: record_shard(rec, batch_size=1, num_parts=2, part_index=0)  # noqa: E731
        cases.ends_well(seed, data, case, [str(rec)])
    assert cases.count == 400 and cases.refused > 100


@pytest.fixture
def idx_bytes():
    head = bytes((0, 0, 8, 3)) + struct.pack(">3I", 5, 4, 3)
    return head + bytes(range(60))


def test_any_idx_file_is_read_or_refused_by_its_name(idx_bytes, tmp_path):
    path, cases = tmp_path / "train-images-idx3-ubyte", Cases()
    for seed, random in seeds(2000, 400):
        packed = gzip.compress(idx_bytes, mtime=0)
        data = bytes_(random, packed if seed % 2 else idx_bytes, packed)
        path.write_bytes(data)
        cases.ends_well(seed, data, lambda: _sane(read_idx(path)), [str(path)])
    assert cases.count == 400 and cases.refused > 200


def _sane(array):
    assert array.nbytes < 1 << 20 and array.flags.writeable and array.dtype.isnative


@pytest.mark.parametrize(
    "head",
    [
        bytes((0, 0, 8, 2)) + struct.pack(">2I", 1 << 31, 1 << 31),
        bytes((0, 0, 14, 4)) + struct.pack(">4I", *[1 << 31] * 4),
        bytes((0, 0, 8, 2)) + struct.pack(">2I", 1 << 32 - 1, 1 << 31) * 1,
        bytes((0, 0, 8, 255)) + struct.pack(">I", 1) * 255 + b"x",
        bytes((0, 0, 8, 40)) + struct.pack(">I", 1) * 40 + b"x",
        bytes((0, 0, 8, 3)) + struct.pack(">3I", 1 << 31, 1 << 31, 4),  # 2**64 elements
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_dimensions_are_not_believed(head, pack, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(pack(head))
    assert Cases().ends_well(0, head, lambda: read_idx(path), [str(path)])


def test_a_bomb_is_not_unpacked(tmp_path):
    head = bytes((0, 0, 8, 1)) + struct.pack(">I", 5)
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(head + bytes(1 << 25)))
    error = Cases().ends_well(0, "bomb", lambda: read_idx(path), [str(path)])
    assert error is not None and "too long: 132 bytes" in str(error)


def test_any_set_of_pictures_is_read_or_refused(tmp_path, idx_bytes):
    labels = bytes((0, 0, 8, 1)) + struct.pack(">I", 5) + bytes(5)
    names = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte",
             "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]  # fmt: skip
    cases = Cases()
    for seed, random in seeds(3000, 100):
        good = dict(zip(names, [idx_bytes, labels] * 2))
        name = random.choice(names)
        good[name] = bytes_(random, good[name], labels)
        for file, data in good.items():
            (tmp_path / file).write_bytes(data)
        cases.ends_well(seed, good[name], lambda: load_images(str(tmp_path)).num_classes, names)
    assert cases.count == 100 and cases.refused > 40


def test_any_picture_in_a_record_is_decoded_or_left_out(tmp_path):
    picture = np.random.RandomState(0).randint(0, 255, (8, 8, 3), np.uint8)
    cases = Cases()
    for seed, random in seeds(4000, 100):
        good = mx.recordio.pack(mx.recordio.IRHeader(0, 1.0, 0, 0), png(picture))
        data = bytes_(random, good, good)
        cases.ends_well(seed, data, lambda d=data: _fault(d))
    assert cases.count == 100 and cases.refused == 0


def _fault(data):
    from gluon_esgd.data.decoding import image_fault

    assert image_fault(data) is None or image_fault(data).startswith("no image: ")
