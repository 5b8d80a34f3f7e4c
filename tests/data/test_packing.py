"""From folders of pictures to RecordIO: the right records, once, whatever happens meanwhile."""

import io
import os
import signal
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from PIL import Image

from gluon_esgd.data import (
    BrokenPicturesError,
    check_records,
    folders,
    pack_folder,
    packing,
    record_shard,
    record_writer,
)
from gluon_esgd.data.framing import frame
from gluon_esgd.data.picture import read_picture

from ..pool import ROOT, environment
from .packs import COLOURS, FILES, colours, command, content_of, draw, records
from .pictures import InThisProcess


def test_a_frame_is_that_of_mxnets_writer(tmp_path):
    magic = b"\x0a\x23\xd7\xce"
    contents = [b"", b"a", magic, b"abcd" + magic, b"ab" + magic + b"cd", magic * 3 + b"x"]
    contents += [b"1234" + magic + b"5678" + magic + b"9", bytes(range(256))]
    writer = mx.recordio.MXRecordIO(str(tmp_path / "a.rec"), "w")
    for text in contents:
        writer.write(text)
    writer.close()
    assert b"".join(map(frame, contents)) == (tmp_path / "a.rec").read_bytes()


def test_from_folders_to_batches(tmp_path):
    """The command, with pictures of all kinds, and what MXNet reads from what it made."""
    folder, to = tmp_path / "pictures", tmp_path / "made here"
    colours(folder / "train", 4)
    colours(folder / "val", 2, ".png")
    for name, colour in COLOURS.items():
        root = folder / "train" / name
        draw(root / "deeper" / "a.png", colour, mode="RGBA")
        draw(root / "P.PNG", colour, mode="P")
        draw(root / "c.JPEG", colour, mode="CMYK")
        draw(root / "line\nbreak.bmp", colour)
        (root / "link.jpg").symlink_to(root / "0.jpg")
        (root / ".hidden.jpg").write_text("x")
        (root / "notes.txt").write_text("x")
    said = command(folder, "--to", to, "--workers", 1).stdout
    assert "train.rec   27 records, " in said and "val.rec     6 records, " in said
    assert "3 files that are no pictures of a class, as " in said and "pictures/s" in said
    assert f"python recipes/resnet50_imagenet.py --data '{to}'" in said
    assert sorted(content_of(to)) == sorted(FILES)
    assert (to / "classes.txt").read_text().splitlines() == sorted(COLOURS)

    labels = []
    for name, count in (("train", 27), ("val", 6)):
        assert check_records(to / f"{name}.rec", decode=True) == count
        headers = [header for header, _ in records(to / f"{name}.rec")]
        assert [(h.flag, h.id, h.id2) for h in headers] == [(0, i, 0) for i in range(count)]
        shard = record_shard(to / f"{name}.rec", batch_size=3, num_parts=2, part_index=0)
        assert shard.records == count
        seen = []
        for part in range(2):
            shard = record_shard(to / f"{name}.rec", batch_size=1, num_parts=2, part_index=part)
            reader = mx.io.ImageRecordIter(
                **shard.arguments, data_shape=(3, 12, 12), verbose=False, preprocess_threads=1
            )
            for data, label in shard.each_once(reader):
                label = int(label.asscalar())
                mean = data[0, :, 4:, 4:].mean(axis=(1, 2)).asnumpy()
                assert np.abs(mean - COLOURS[sorted(COLOURS)[label]]).max() < 12
                seen.append(label)
        assert sorted(seen) == sorted([0, 1, 2] * (count // 3))
        labels.append(seen)
    assert labels[0] != sorted(labels[0])
    given = [path.read_bytes() for path in (folder / "train").rglob("[!.]*.*") if path.is_file()]
    packed = [image for _, image in records(to / "train.rec")]
    assert sorted(packed) == sorted(image for image in given if image != b"x")


def test_the_bytes_do_not_depend_on_the_workers(tmp_path, monkeypatch):
    folder = colours(tmp_path / "pictures", 20)
    monkeypatch.setattr(packing, "_BATCH_PICTURES", 5)
    how = {"resize": 10, "validation": 0.2}
    two = pack_folder(folder, tmp_path / "two", workers=2, **how)
    monkeypatch.setattr(packing, "PicturePool", InThisProcess)
    pack_folder(folder, tmp_path / "one", workers=1, **how)
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")
    assert (two.records, two.classes) == ({"train": 48, "val": 12}, 3)
    pack_folder(folder, tmp_path / "other", seed=1, **how)
    assert content_of(tmp_path / "one")["train.rec"] != content_of(tmp_path / "other")["train.rec"]


ENDED_IN_A_COMMIT = """
import os, signal, sys
from gluon_esgd import cli
from gluon_esgd.data import packing, record_writer
from tests.data.pictures import InThisProcess

if int(sys.argv[1]) == signal.SIGKILL:  # it takes seconds to start others
    packing.PicturePool = InThisProcess
sent, packing._COMMIT_S, sync, calls = int(sys.argv[1]), 0, record_writer._sync, []
def ending(file):
    sync(file)
    calls.append(file)
    if len(calls) == 8:  # of the third commit file and index, but not the journal
        os.kill(os.getpid(), sent)
record_writer._sync = ending
sys.exit(cli.main(sys.argv[2:]))
"""


def test_killed_and_interrupted_it_goes_on_to_the_same_bytes(tmp_path, here, caplog):
    folder, to = colours(tmp_path / "pictures", 40), tmp_path / "made"
    (folder / "blue" / "2.jpg").write_text("broken")

    def end_by(number):
        argv = ["data", folder, "--to", to, "--workers", 1, "--skip-broken"]
        return subprocess.run(
            [sys.executable, "-c", ENDED_IN_A_COMMIT, str(int(number)), *map(str, argv)],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=ROOT,
            env=environment(),
        )

    assert end_by(signal.SIGKILL).returncode == -signal.SIGKILL
    assert sorted(content_of(to / ".parts")) == [
        "plan.json",
        "train.idx",
        "train.journal",
        "train.rec",
    ]
    assert sorted(path.name for path in to.iterdir()) == [".lock", ".parts"]
    with open(to / ".parts" / "train.journal", "ab") as journal:
        journal.write(b'{"pictures": 48')  # as a kill in the middle of a line leaves it
    interrupted = end_by(signal.SIGINT)
    assert interrupted.returncode == 130 and "train: goes on at picture 32 of 120" in (
        interrupted.stderr
    )
    assert interrupted.stderr.endswith("interrupted; the same command goes on from here\n")
    with caplog.at_level("INFO", "gluon_esgd.data.packing"):
        resumed = pack_folder(folder, to, skip_broken=True)
    assert "train: goes on at picture 64 of 120" in caplog.text and resumed.pictures == 56
    undisturbed = pack_folder(folder, tmp_path / "undisturbed", skip_broken=True)
    assert content_of(to) == content_of(tmp_path / "undisturbed")
    assert resumed.records == undisturbed.records == {"train": 119}
    assert resumed.left_out == undisturbed.left_out and len(resumed.left_out) == 1


@pytest.mark.parametrize("moves", range(4))
def test_ended_while_files_are_moved_the_rest_follows(tmp_path, here, monkeypatch, moves):
    folder, to = colours(tmp_path / "pictures", 3), tmp_path / "made"
    made = []

    def rename(old, new):
        if len(made) == moves:
            raise KeyboardInterrupt
        made.append(new.name)
        os.replace(old, new)

    monkeypatch.setattr(record_writer.os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        pack_folder(folder, to, validation=0.4)
    assert made == ["val.rec", "val.idx", "train.rec", "train.idx"][:moves]
    monkeypatch.undo()
    monkeypatch.setattr(packing, "PicturePool", InThisProcess)
    assert pack_folder(folder, to, validation=0.4).pictures == 0
    pack_folder(folder, tmp_path / "undisturbed", validation=0.4)
    assert content_of(to) == content_of(tmp_path / "undisturbed")


def test_broken_pictures_are_named_and_can_be_left_out(tmp_path, here, monkeypatch):
    folder, to = colours(tmp_path / "pictures", 12), tmp_path / "made"
    whole = (folder / "blue" / "0.jpg").read_bytes()
    broken = {
        "a half.jpg": (whole[:-4], "a JPEG whose end is missing"),
        "b tables.jpg": (whole.replace(b"\xff\xc4", b"\xff\xc5"), "Decoding failed"),
        "c.png": (b"text", "Decoding failed"),
        "d empty.png": (b"", "it is empty"),
        "e.webp": (b"RIFF1234WEBPVP8 ", "with resize others become JPEG"),
    }
    for name, (bytes_, _) in broken.items():
        (folder / "blue" / name).write_bytes(bytes_)
    (folder / "blue" / "f.jpg").symlink_to("nowhere")
    os.mkfifo(folder / "blue" / "g.jpg")
    whys = [why for _, why in broken.values()]
    whys += ["a link that leads nowhere", "it is no regular file"]
    monkeypatch.setattr(folders, "_SHOWN", 6)
    with pytest.raises(BrokenPicturesError) as caught:
        pack_folder(folder, to)
    said = str(caught.value).splitlines()
    assert said[0] == (
        "7 broken picture(s): mend them, or leave them out with skip_broken, at once:"
    )
    for line, (path, why), wanted in zip(said[1:7], caught.value.pictures, whys):
        assert line == f"  - {path}: {why}" and wanted in why
    assert said[7:] == ["  - and 1 more"] and whys[6] in caught.value.pictures[6][1]
    assert [path.name for path in to.iterdir()] == [".parts"]

    packed = pack_folder(folder, to, skip_broken=True)
    assert (packed.pictures, packed.records) == (0, {"train": 36})
    lines = (to / "left-out.txt").read_text().splitlines()
    assert lines == [f"{path}\t{why}" for path, why in caught.value.pictures]
    assert [header.id for header, _ in records(to / "train.rec")] == list(range(36))
    assert check_records(to / "train.rec", decode=True) == 36
    again = pack_folder(folder, to, skip_broken=True)
    assert again.pictures == 0 and again.left_out == packed.left_out == caught.value.pictures


def test_where_all_are_broken_nothing_is_made(tmp_path, here):
    (tmp_path / "in" / "cat").mkdir(parents=True)
    (tmp_path / "in" / "cat" / "a.jpg").touch()
    with pytest.raises(BrokenPicturesError, match=r"no picture is left for train\.rec:\n.*empty"):
        pack_folder(tmp_path / "in", tmp_path / "out", skip_broken=True)


def test_resized_pictures_are_upright_rgb_over_white(tmp_path):
    def become(name, resize=10, **how):
        draw(tmp_path / name, COLOURS["blue"], (60, 30), **how)
        read = read_picture(str(tmp_path / name), resize, 95)
        assert read.fault is None
        with Image.open(io.BytesIO(read.image)) as image:
            image.load()
        return image.format, image.mode, image.size, np.asarray(image)[-1, -1]

    turned = Image.Exif()
    turned[0x0112] = 6
    for name, how in {
        "a.jpg": {},
        "cmyk.jpg": {"mode": "CMYK"},
        "p.png": {"mode": "P"},
        "rgba.png": {"mode": "RGBA"},
        "w.webp": {"lossless": True},
    }.items():
        *form, pixel = become(name, **how)
        assert form == ["JPEG", "RGB", (20, 10)], name
        assert np.abs(pixel.astype(int) - COLOURS["blue"]).max() < 12, name
    assert become("exif.jpg", exif=turned)[2] == (10, 20)
    clear = become("clear.png", transparency=COLOURS["blue"])
    assert clear[:3] == ("JPEG", "RGB", (20, 10)) and clear[3].min() > 245
    grey = become("grey.png", mode="L")[3]
    assert np.ptp(grey.astype(int)) == 0
    Image.fromarray(np.full((30, 60), 40000, "u2")).save(tmp_path / "16.png")
    deep = read_picture(str(tmp_path / "16.png"), 10, 95).image
    assert abs(int(np.asarray(Image.open(io.BytesIO(deep)))[0, 0, 0]) - 40000 // 256) < 3
    # What is small is not enlarged, and a JPEG not even made anew.
    assert become("small.png", resize=40)[:3] == ("JPEG", "RGB", (60, 30))
    assert read_picture(str(tmp_path / "a.jpg"), 40, 95).image == (tmp_path / "a.jpg").read_bytes()
    worse = read_picture(str(tmp_path / "rgba.png"), 10, 5).image
    assert len(worse) < len(read_picture(str(tmp_path / "rgba.png"), 10, 95).image)
    (tmp_path / "half.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:-2])
    assert "end is missing" in read_picture(str(tmp_path / "half.jpg"), 10, 95).fault
    (tmp_path / "text.jpg").write_text("text")
    assert "nothing that Pillow knows" in read_picture(str(tmp_path / "text.jpg"), 10, 95).fault
