"""From folders of pictures to RecordIO: the right records, once, whatever happens meanwhile."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from unittest.mock import Mock

import mxnet as mx
import numpy as np
import pytest
from PIL import Image

from gluon_esgd import cli
from gluon_esgd.data import (
    BrokenPicturesError,
    check_records,
    pack_folder,
    packing,
    packing_folder,
    picture_pool,
    record_shard,
    record_writer,
)
from gluon_esgd.data.folders import list_folder
from gluon_esgd.data.framing import content, frame, scan
from gluon_esgd.data.picture import read_picture

from ..pool import ROOT, environment
from .pictures import InThisProcess

COLOURS = {"blue": (20, 40, 200), "green sea": (30, 190, 90), "réd": (210, 30, 40)}
FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "bmp": "BMP", "webp": "WEBP"}
FILES = ["train.rec", "train.idx", "val.rec", "val.idx", "classes.txt", "packed.json"]


def draw(path, colour=(9, 99, 199), size=(20, 16), mode="RGB", **how):
    """Write a picture that is all of one colour, but for one pixel that makes it unique."""
    image = Image.new("RGB", size, colour)
    image.putpixel((0, 0), tuple(np.random.RandomState(len(str(path))).randint(0, 255, 3)))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(path, FORMATS[path.suffix[1:].lower()], **how)


def colours(root, count, suffix=".jpg"):
    for name, colour in COLOURS.items():
        for i in range(count):
            draw(root / name / f"{i}{suffix}", colour)
    return root


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(packing, "PicturePool", InThisProcess)


def command(*argv, code=0, timeout=100):
    done = subprocess.run(
        [sys.executable, "-m", "gluon_esgd.cli", "data", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def records(path_rec):
    """(header, image) of each record of a file, as MXNet unpacks it."""
    data = path_rec.read_bytes()
    return [mx.recordio.unpack(content(data, begin)) for _, begin, _ in scan(data).records]


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
    monkeypatch.setattr(packing, "_SHOWN", 6)
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


LAYOUTS = {
    "pictures beside": (["a.jpg"], "holds no folders, but 1 file"),
    "empty class": (["cat/a.jpg", "dog/"], "/dog holds no picture"),
    "no picture in class": (["cat/a.jpg", "dog/a.txt"], "/dog holds no picture"),
    "flat val": (["train/cat/a.jpg", "val/1.jpg"], "no picture in a class folder, but 1 file"),
    "foreign class": (["train/cat/a.jpg", "val/dog/1.jpg"], "/dog: .*/train has no class of that"),
    "line break": (["a\nb/a.jpg"], r"a\\nb' has a line break in its name: rename it"),
    "loop": (["cat/a.jpg", "cat/up@.."], "/cat/up is, by a link, a folder that it lies in: remove"),
}


def lay(root, paths):
    for path in paths:
        path, _, link = path.partition("@")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if link:
            (root / path).symlink_to(link)
        elif path.endswith("/"):
            (root / path).mkdir()
        else:
            (root / path).write_text("x")


@pytest.mark.parametrize("paths, says", LAYOUTS.values(), ids=LAYOUTS)
def test_a_wrong_layout_is_told(tmp_path, paths, says):
    lay(tmp_path, paths)
    with pytest.raises(ValueError, match=says):
        list_folder(str(tmp_path))


def test_layouts(tmp_path):
    lay(tmp_path / "a", ["readme.txt", "train/cat/1.jpg", "train/dog/2.jpg", "val/dog/3.png"])
    lay(tmp_path / "a", ["test/x.jpg", "train/.git/x.jpg"])
    both = list_folder(str(tmp_path / "a"))
    assert (both.classes, both.train.paths) == (["cat", "dog"], ["cat/1.jpg", "dog/2.jpg"])
    assert (both.val.paths, list(both.val.labels)) == (["dog/3.png"], [1])
    assert both.ignored == [str(tmp_path / "a" / "readme.txt")]
    with pytest.raises(ValueError, match=r"validation=0\.5: .*/val is there already"):
        list_folder(str(tmp_path / "a"), 0.5)
    lay(tmp_path / "b", ["train/1.jpg", "plane/2.jpg"])  # a class that is called so
    assert list_folder(str(tmp_path / "b")).classes == ["plane", "train"]
    with pytest.raises(FileNotFoundError):
        list_folder(str(tmp_path / "none"))


def test_a_share_of_each_class_is_for_validation(tmp_path):
    counts = {"a": 1, "b": 2, "c": 10, "d": 25}
    lay(tmp_path, [f"{name}/{i:02d}.jpg" for name, count in counts.items() for i in range(count)])
    every = list_folder(str(tmp_path)).train

    def parts(share, seed=0):
        listing = list_folder(str(tmp_path), share, seed)
        return listing.train, listing.val

    for share, wanted in ((0.1, [0, 0, 1, 3]), (0.5, [0, 1, 5, 13]), (0.99, [0, 1, 9, 24])):
        train, val = parts(share)
        assert list(np.bincount(val.labels, minlength=4)) == wanted
        assert sorted(train.paths + val.paths) == every.paths
    assert parts(0.5)[1].paths == parts(0.5)[1].paths != parts(0.5, 1)[1].paths
    with pytest.raises(ValueError, match=r"validation=0\.001 of the classes .* less than one"):
        parts(0.001)


def test_other_arguments_or_pictures_begin_anew_and_nothing_is_overwritten(
    tmp_path, here, caplog, monkeypatch
):
    folder, to = colours(tmp_path / "pictures", 2), tmp_path / "made"

    def leave_unfinished(**how):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(packing_folder.PackingFolder, "finish", interrupt)
            pack_folder(folder, to, **how)

    def interrupt(*args):
        raise KeyboardInterrupt

    leave_unfinished()
    leave_unfinished(seed=1)
    assert "begins anew: not the same as before are seed" in caplog.text
    draw(folder / "blue" / "more.jpg")
    assert pack_folder(folder, to, seed=1).records == {"train": 7}
    assert "begins anew: not the same as before are the pictures in the folder" in caplog.text
    before = content_of(to)
    for how in ({}, {"seed": 1, "resize": 8}):
        with pytest.raises(FileExistsError, match=r"train\.rec is there, made otherwise"):
            pack_folder(folder, to, **how)
    assert pack_folder(folder, to, seed=1).pictures == 0
    assert content_of(to) == before
    (tmp_path / "classes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"classes\.txt is there"):
        pack_folder(folder, tmp_path)


def test_a_full_disk_and_a_folder_at_work(tmp_path, here, monkeypatch):
    folder, to = colours(tmp_path / "pictures", 2), tmp_path / "made"
    at_work = pytest.raises(BlockingIOError, match="another process packs into")
    with packing_folder.PackingFolder(to, {}, []), at_work:
        pack_folder(folder, to)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="goes on from here"):
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(record_writer, "_sync", Mock(side_effect=full))
        pack_folder(folder, to)
    usage = shutil.disk_usage(tmp_path)._replace(free=2000)
    monkeypatch.setattr(packing_folder.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="make room, or name a folder on another disk"):
        pack_folder(folder, to)


@pytest.mark.parametrize(
    "how, says",
    [
        ({"resize": 0}, "resize=0 must be from 1 to 65535"),
        ({"quality": 101}, "quality=101 must be from 1 to 100"),
        ({"workers": 0}, "workers=0 must be from 1"),
        ({"seed": -1}, "seed=-1 must be 0 or more"),
        ({"validation": 1}, "validation=1 must be more than 0 and less than 1"),
        ({"to": "in/cat/made"}, "lies among the classes: name a folder elsewhere"),
    ],
)
def test_wrong_arguments(tmp_path, monkeypatch, how, says):
    monkeypatch.chdir(tmp_path)
    lay(tmp_path, ["in/cat/a.jpg"])
    with pytest.raises(ValueError, match=says):
        pack_folder("in", how.pop("to", "out"), **how)
    assert not (tmp_path / "out").exists()


def test_without_pillow_resizing_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert cli.main(["data", str(tmp_path), "--to", str(tmp_path / "o"), "--resize", "8"]) == 2
    assert "resize needs Pillow: pip install 'gluon-esgd[recipes]'" in capsys.readouterr().err


A_PROCESS = """
import os, signal, sys, time
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
connection.send("ready")
while True:
    paths = connection.recv()
    if "crash" in paths[-1]:
        os.kill(os.getpid(), signal.SIGKILL)
    while "hang" in paths[-1]:
        time.sleep(60)
    connection.send([path.upper() for path in paths])
"""


def test_a_picture_that_ends_or_stops_its_process_is_a_broken_one(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} -c '{A_PROCESS}' \"$@\"\n")
    python.chmod(0o700)
    monkeypatch.setattr(picture_pool.sys, "executable", str(python))
    with picture_pool.PicturePool(1, None, 95) as pool:
        ((_, (*good, crashed)),) = pool.read([["a", "b", "crash"]])
        assert good == ["A", "B"]
        assert "the process that decoded it was ended by signal 9" in crashed.fault
        monkeypatch.setattr(picture_pool, "_PICTURE_S", 0.2)
        ((_, (hung,)),) = pool.read([["hang"]])
        assert "the process that decoded it said nothing for 0.2 s" in hung.fault
        assert pool._all[-1]._popen.wait(10) == -signal.SIGKILL
    assert all(process._popen.returncode is not None for process in pool._all)


def test_processes_that_do_not_start_say_why(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setattr(picture_pool.sys, "executable", str(python))
    why = pytest.raises(RuntimeError, match="ended with exit code 3: no such module")
    with picture_pool.PicturePool(1, None, 95) as pool, why:
        list(pool.read([["a"]]))


def test_check_names_file_record_and_byte(tmp_path, here, capsys, monkeypatch):
    monkeypatch.setenv("MXNET_CPU_WORKER_NTHREADS", "2")
    pack_folder(colours(tmp_path / "in", 3), tmp_path, validation=0.4)
    assert cli.main(["data", str(tmp_path), "--check"]) == 0
    assert f"{tmp_path / 'train.rec'}: 6 records, all sound" in capsys.readouterr().out
    data = bytearray((tmp_path / "val.rec").read_bytes())
    _, begin, end = scan(bytes(data)).records[1]
    data[end - 8 : end] = bytes(8)
    (tmp_path / "val.rec").write_bytes(bytes(data))
    assert cli.main(["data", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr()
    assert (
        f"{tmp_path / 'val.rec'}: record 1 at byte {begin}: no image: a JPEG whose end is missing"
        in said.err
    )
    assert "train.rec: 6 records, all sound" in said.out
    for argv, says in (
        ([str(tmp_path), "--check", "--to", "x"], "leave out --to"),
        ([str(tmp_path / "in"), "--check"], "there is no .rec file in"),
        ([str(tmp_path)], "--to is missing"),
    ):
        assert cli.main(["data", *argv]) == 2
        assert says in capsys.readouterr().err


def test_the_command_ends_with_1_where_pictures_are_broken(tmp_path, here, capsys):
    folder = colours(tmp_path / "in", 1)
    (folder / "blue" / "bad.jpg").touch()
    assert cli.main(["data", str(folder), "--to", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "leave them out with --skip-broken, at once" in said and "bad.jpg: it is empty" in said
    argv = ["data", str(folder), "--to", str(tmp_path / "out"), "--skip-broken"]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "left out    1 broken pictures (left-out.txt)" in said
    assert "--validation 0.1 makes it" in said
    assert json.loads((tmp_path / "out" / "packed.json").read_text())["records"] == {"train": 3}
