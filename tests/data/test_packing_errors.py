"""What packing says of folders, arguments, disks and processes that are not right."""

import errno
import json
import shutil
import signal
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from gluon_esgd import cli
from gluon_esgd.data import (
    pack_folder,
    packing_folder,
    picture_pool,
    record_writer,
)
from gluon_esgd.data.folders import list_folder
from gluon_esgd.data.framing import scan

from .packs import colours, content_of, draw

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
