"""A check before the run names file, record and byte; a copy leaves out what is broken."""

import logging
import os
import struct

import mxnet as mx
import numpy as np
import pytest

from gluon_esgd.data import check_records, copy_good_records, framing, records, write_index
from gluon_esgd.data.framing import content, scan

from .pictures import write_pictures

MAGIC = struct.pack("<I", 0xCED7230A)


@pytest.fixture
def rec(tmp_path):
    """Ten pictures; `rec.offsets` says where their records begin."""

    class Rec:
        path, idx = tmp_path / "ten.rec", tmp_path / "ten.idx"
        copy = tmp_path / "good.rec"
        offsets = write_pictures(tmp_path / "ten.rec", 10)

        def overwrite(self, offset, new):
            data = bytearray(self.path.read_bytes())
            data[offset : offset + len(new)] = new
            self.path.write_bytes(bytes(data))

        def fault(self, **how):
            with pytest.raises(ValueError) as caught:
                check_records(self.path, **how)
            return str(caught.value)

    return Rec()


def labels(path):
    """The labels of a file as MXNet's reader of whole files sees them."""
    reader = mx.io.ImageRecordIter(
        path_imgrec=str(path),
        path_imgidx=str(path)[:-4] + ".idx",
        data_shape=(3, 8, 8),
        batch_size=1,
        preprocess_threads=1,
        verbose=False,
    )
    return [int(batch.label[0].asscalar()) for batch in reader]


def test_sound_files_give_their_number_of_records(rec):
    assert check_records(rec.path) == check_records(str(rec.path), rec.idx, decode=True) == 10


def test_a_walk_that_lasts_shows_a_bar(rec, monkeypatch, capsys):
    check_records(rec.path, progress=True)
    assert capsys.readouterr().err == "", "it took no five seconds"
    monkeypatch.setattr(records, "_QUIET_S", 0)
    check_records(rec.path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(framing, "_TELL_EVERY", 3)
    check_records(rec.path, progress=True)
    assert "checking ten.rec" in capsys.readouterr().err


def test_a_truncated_file(rec):
    size = rec.offsets[9] + 50
    os.truncate(rec.path, size)
    said = rec.fault()
    assert f"{rec.path}: record 9 at byte {rec.offsets[9]}: truncated, or a wrong length" in said
    assert "42 left" in said and "(1 fault(s))" in said


def test_a_file_truncated_in_a_header(rec):
    os.truncate(rec.path, rec.offsets[9] + 5)
    assert f"record 9 at byte {rec.offsets[9]}: truncated: 5 bytes are left" in rec.fault()


def test_a_file_truncated_between_two_records(rec):
    os.truncate(rec.path, rec.offsets[8])
    said = rec.fault()
    assert f"line 9: key 8 points at byte {rec.offsets[8]}, where no record begins" in said
    assert "(2 fault(s))" in said


def test_a_flipped_magic_number_blames_its_own_record(rec):
    rec.overwrite(rec.offsets[4], b"\x0b")
    said = rec.fault()
    assert f"record 4 at byte {rec.offsets[4]}: no magic number: 0xced7230b" in said
    assert "(1 fault(s))" in said


@pytest.mark.parametrize("by", [-8, -1, 1, 8, 4000])
def test_a_flipped_length_blames_its_own_record(rec, by):
    at = rec.offsets[4] + 4
    (length,) = struct.unpack_from("<I", rec.path.read_bytes(), at)
    rec.overwrite(at, struct.pack("<I", length + by))
    said = rec.fault()
    assert f"record 4 at byte {rec.offsets[4]}: " in said and "wrong length" in said
    assert "(1 fault(s))" in said


@pytest.mark.parametrize("flag, says", [(7, "flag 7 must be"), (2, "in the middle of a record"),
                                        (1, "its last part is missing")])  # fmt: skip
def test_flipped_flags(rec, flag, says):
    at = rec.offsets[4] + 4
    (length,) = struct.unpack_from("<I", rec.path.read_bytes(), at)
    rec.overwrite(at, struct.pack("<I", length | flag << 29))
    assert says in rec.fault()


def test_flipped_bytes_of_an_image_show_when_it_is_decoded(rec):
    rec.overwrite(rec.offsets[6] + 36, b"12345678")
    assert check_records(rec.path) == 10
    said = rec.fault(decode=True)
    assert f"record 6 at byte {rec.offsets[6]}: no image: " in said and "(1 fault(s))" in said


@pytest.mark.parametrize("at, new", [(32, b"x"), (38, b"x"), (50, b"xy"), (-16, b"xyz")])
def test_any_change_of_a_png_shows_when_it_is_decoded(rec, at, new):
    rec.overwrite(rec.offsets[6 if at > 0 else 7] + at, new)
    assert f"record 6 at byte {rec.offsets[6]}: no image: " in rec.fault(decode=True)


def test_a_record_that_is_no_image(tmp_path):
    record = mx.recordio.MXIndexedRecordIO(str(tmp_path / "t.idx"), str(tmp_path / "t.rec"), "w")
    for key, text in enumerate((b"short", b"x" * 24, b"y" * 40)):
        record.write_idx(key, text)
    record.close()
    assert check_records(tmp_path / "t.rec") == 3
    with pytest.raises(ValueError, match="fit for a run") as caught:
        check_records(tmp_path / "t.rec", decode=True)
    assert str(caught.value).count("no image: ") == 3


def test_several_faults_are_all_named_and_the_rest_still_counts(rec):
    rec.overwrite(rec.offsets[2], b"junk")
    rec.overwrite(rec.offsets[5] + 4, b"\xff\xff\xff\x1f")
    os.truncate(rec.path, rec.offsets[9] + 20)
    found = scan(rec.path.read_bytes())
    assert [number for number, _, _ in found.records] == [0, 1, 3, 4, 6, 7, 8]
    assert [(f.record, f.offset) for f in found.faults] == [(n, rec.offsets[n]) for n in (2, 5, 9)]


def test_many_faults_are_counted_and_the_first_are_shown(tmp_path):
    offsets = write_pictures(tmp_path / "r.rec", 30)
    (tmp_path / "r.idx").write_text("".join(f"{i} {offset}\n" for i, offset in enumerate(offsets)))
    with pytest.raises(ValueError) as caught:
        check_records(tmp_path / "r.rec")
    assert "(31 fault(s))" in str(caught.value) and "and 11 more" in str(caught.value)
    assert "line 20: '19 " in str(caught.value) and "line 21:" not in str(caught.value)


def test_no_index(rec):
    rec.idx.unlink()
    assert f"{rec.idx}: there is no index; write_index() makes one" in rec.fault()
    assert write_index(rec.path) == 10
    assert check_records(rec.path) == 10 and labels(rec.path) == list(range(10))


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("3\t{3}\n", "3\t{3}1\n", "line 4: key 3 points at byte {3}1, where no record begins"),
        ("3\t{3}\n", "3\t{2}\n", "line 4: key 3 points at byte {2}, as an earlier line does"),
        ("3\t{3}\n", "2\t{3}\n", "line 4: key 2 stands in line 3 already"),
        ("3\t{3}\n", "", "1 of 10 records are not in it, the first is record 3 at byte {3}"),
        ("3\t{3}\n", "3\n", "line 4: '3' is not a key, a tab and an offset"),
        ("3\t{3}\n", "x\t{3}\n", r"line 4: 'x\t{3}' is not a key, a tab and an offset"),
    ],
)
def test_a_wrong_index(rec, old, new, says):
    old, new, says = (text.format(*rec.offsets) for text in (old, new, says))
    rec.idx.write_text(rec.idx.read_text().replace(old, new))
    assert f"{rec.idx}: {says}" in rec.fault()
    write_index(rec.path)
    assert check_records(rec.path) == 10


def test_the_index_of_another_file(rec, tmp_path):
    write_pictures(tmp_path / "seven.rec", 7, key=lambda i: 10 - i)
    rec.idx.write_text((tmp_path / "seven.idx").read_text())
    assert "3 of 10 records are not in it, the first is record 7" in rec.fault()


def test_an_empty_file(tmp_path):
    (tmp_path / "none.rec").touch()
    (tmp_path / "none.idx").touch()
    with pytest.raises(ValueError, match="record 0 at byte 0: the file is empty"):
        check_records(tmp_path / "none.rec")
    with pytest.raises(FileNotFoundError):
        check_records(tmp_path / "no_such.rec")


def test_an_index_is_not_written_for_a_broken_file(rec):
    before = rec.idx.read_text()
    os.truncate(rec.path, rec.offsets[9] + 50)
    with pytest.raises(ValueError, match=r"copy_good_records\(\) leaves out what is broken"):
        write_index(rec.path)
    assert rec.idx.read_text() == before


def test_a_copy_has_what_is_good_and_the_reader_takes_it(rec, caplog):
    rec.overwrite(rec.offsets[2], b"junk")
    rec.overwrite(rec.offsets[6] + 36, b"12345678")
    os.truncate(rec.path, rec.offsets[9] + 50)
    with caplog.at_level(logging.WARNING, "gluon_esgd.data.records"):
        assert copy_good_records(rec.path, rec.copy, decode=True) == 7
    assert [f"left out record {n} at byte {rec.offsets[n]}" in r.getMessage()
            for n, r in zip((2, 6, 9), caplog.records)] == [True] * 3  # fmt: skip
    assert check_records(rec.copy, decode=True) == 7
    assert labels(rec.copy) == [0, 1, 3, 4, 5, 7, 8]
    assert not list(rec.copy.parent.glob("*.new"))


def test_a_copy_keeps_keys_where_it_can(rec):
    write_pictures(rec.path, 10, key=lambda i: 100 - i)
    os.truncate(rec.path, rec.offsets[9] + 50)
    copy_good_records(rec.path, rec.copy)
    reader = mx.recordio.MXIndexedRecordIO(str(rec.copy)[:-4] + ".idx", str(rec.copy), "r")
    assert reader.keys == [100 - i for i in range(9)]
    assert mx.recordio.unpack(reader.read_idx(96))[0].label == 4
    reader.close()
    rec.idx.write_text("1\t0\n")
    copy_good_records(rec.path, rec.copy)
    text = (rec.copy.parent / "good.idx").read_text()
    assert [int(line.split()[0]) for line in text.splitlines()] == list(range(9))


def test_nothing_good_is_no_copy(rec):
    os.truncate(rec.path, 20)
    with pytest.raises(ValueError, match="record 0 at byte 0: truncated"):
        copy_good_records(rec.path, rec.copy)
    assert not rec.copy.exists()


def test_content_that_holds_the_magic_number_is_joined_again(tmp_path):
    texts = [MAGIC, b"abcd" + MAGIC, MAGIC * 3 + b"ab", b"abc" + MAGIC, b"", b"plain"]
    record = mx.recordio.MXIndexedRecordIO(str(tmp_path / "m.idx"), str(tmp_path / "m.rec"), "w")
    for key, text in enumerate(texts):
        record.write_idx(key, text)
    record.close()
    assert check_records(tmp_path / "m.rec") == len(texts)
    data = (tmp_path / "m.rec").read_bytes()
    assert [content(data, begin) for _, begin, _ in scan(data).records] == texts


def test_content_is_not_taken_for_a_header(tmp_path):
    """Where a whole header is lost, the search for the next one skips what cannot be one."""
    record = mx.recordio.MXRecordIO(str(tmp_path / "m.rec"), "w")
    for text in (b"first", b"a" + MAGIC + b"\0" * 7, b"third"):
        record.write(text)
    record.close()
    data = bytearray((tmp_path / "m.rec").read_bytes())
    data[16:24] = b"no magic"
    found = scan(bytes(data))
    assert [begin for _, begin, _ in found.records] == [36]
    (fault,) = found.faults
    assert "record 0 at byte 0: a wrong length, or the next header is" in str(fault)


def test_the_last_part_of_a_split_record_is_missing(tmp_path):
    record = mx.recordio.MXRecordIO(str(tmp_path / "m.rec"), "w")
    for text in (b"abcd" + MAGIC + b"efgh", b"next"):
        record.write(text)
    record.close()
    data = (tmp_path / "m.rec").read_bytes()
    cut = scan(data[:12])
    assert not cut.records and "its last part is missing" in str(cut.faults[0])
    joined = scan(data[:12] + data[24:])
    assert [number for number, _, _ in joined.records] == [1]
    assert "record 0 at byte 12: its last part is missing" in str(joined.faults[0])


def test_any_flipped_byte_in_a_header_is_found_and_costs_one_record(rec):
    sound = rec.path.read_bytes()
    random = np.random.RandomState(0)
    for number in range(10):
        for at in range(8):
            data = bytearray(sound)
            data[rec.offsets[number] + at] ^= random.randint(1, 256)
            found = scan(bytes(data))
            good = [begin for _, begin, _ in found.records]
            assert len(found.faults) == 1, (number, at, found)
            assert good == rec.offsets[:number] + rec.offsets[number + 1 :], (number, at)
