"""What is looked at in files that `pack_folder` has made, and what is not."""

import json
import os
import shutil

import pytest

from gluon_esgd.data import check_records, pack_folder, packed
from gluon_esgd.data.packed import is_as_packed

from .packs import colours


@pytest.fixture
def files(tmp_path, here):
    """Thirty records, of which five are looked at."""
    pack_folder(colours(tmp_path / "pictures", 10), tmp_path / "made")
    shutil.copytree(tmp_path / "made", tmp_path / "copy")
    return tmp_path / "copy"


def offsets(files):
    return [int(line.split()[1]) for line in (files / "train.idx").read_text().splitlines()]


def write(path, at, new):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(new)


def test_a_copy_is_as_packed(files, monkeypatch):
    assert is_as_packed(files / "train.rec")
    assert not is_as_packed(files / "val.rec"), "there is none"
    monkeypatch.setattr(packed, "SAMPLE", 5)
    assert is_as_packed(str(files / "train.rec"))


def test_a_short_or_long_copy_is_not(files):
    size = os.path.getsize(files / "train.rec")
    for other in (size - 4, offsets(files)[20], 0, size + 4):
        os.truncate(files / "train.rec", other)
        assert not is_as_packed(files / "train.rec")
        with pytest.raises(
            ValueError, match=r"train\.rec: record \d+ at byte \d+: |points at byte"
        ):
            check_records(files / "train.rec")


@pytest.mark.parametrize("first, last", [(29, 30), (0, 1), (9, 17)])
def test_a_copy_with_a_gap_is_not(files, monkeypatch, first, last):
    """Of the right size: room that was made for it, and not filled."""
    monkeypatch.setattr(packed, "SAMPLE", 5)
    at = [*offsets(files), os.path.getsize(files / "train.rec")]
    write(files / "train.rec", at[first], bytes(at[last] - at[first]))
    assert not is_as_packed(files / "train.rec")


@pytest.mark.parametrize("record", [0, 29])
def test_first_and_last_record_are_always_looked_at(files, monkeypatch, record):
    monkeypatch.setattr(packed, "SAMPLE", 2)
    write(files / "train.rec", offsets(files)[record] + 4, b"\x01")
    assert not is_as_packed(files / "train.rec")


def test_a_changed_byte_of_a_picture_is_left_to_the_reader(files):
    write(files / "train.rec", offsets(files)[15] + 100, b"\0\1\2")
    assert is_as_packed(files / "train.rec")


def test_any_other_index_is_not(files):
    index = files / "train.idx"
    text = index.read_text()
    index.write_text(text.replace("\n", "\n ", 1))
    assert not is_as_packed(files / "train.rec")
    index.unlink()
    assert not is_as_packed(files / "train.rec")
    index.write_text(text)
    assert is_as_packed(files / "train.rec")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"bytes": 3, "index": 4}',
        '{"bytes": {"train": 1}, "index": {}}',
        "[" * 9999,
    ],
)
def test_without_a_word_about_it_nothing_is_as_packed(files, text):
    (files / "packed.json").write_text(text)
    assert not is_as_packed(files / "train.rec")
    (files / "packed.json").unlink()
    assert not is_as_packed(files / "train.rec")


def test_an_older_version_did_not_note_the_index(files):
    done = json.loads((files / "packed.json").read_text())
    del done["index"]
    (files / "packed.json").write_text(json.dumps(done))
    assert not is_as_packed(files / "train.rec")
