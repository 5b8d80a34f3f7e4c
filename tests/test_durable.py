"""A file is there as a whole or as it was."""

import errno
import os

import pytest

from gluon_esgd.durable import moved_to, write_whole


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"before")
    with pytest.raises(ZeroDivisionError), moved_to(path) as beside:
        beside.write_bytes(b"half")
        raise ZeroDivisionError
    with pytest.raises(OSError) as full, moved_to(path) as beside:
        beside.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(path))
    assert os.listdir(tmp_path) == ["file"] and path.read_bytes() == b"before"
    with pytest.raises(OSError, match="no name of mine"), moved_to(path):
        raise OSError("no name of mine")
    with pytest.raises(FileNotFoundError) as none:
        write_whole(tmp_path / "none" / "file", b"")
    assert none.value.filename == str(tmp_path / "none" / "file")


def test_of_two_writers_the_last_one_counts(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with moved_to(path) as mine:
        mine.write_bytes(b"mine, which is longer")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        write_whole(path, b"other's")
        assert path.read_bytes() == b"other's"
    assert path.read_bytes() == b"mine, which is longer" and os.listdir(tmp_path) == ["file"]


def test_only_what_shall_outlive_a_crash_is_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda n: synced.append(os.readlink(f"/proc/self/fd/{n}")))
    write_whole(tmp_path / "told", b"x", synced=False)
    assert synced == []
    write_whole(tmp_path / "kept", b"x")
    assert len(synced) == 2 and synced[1] == str(tmp_path) and ".kept." in synced[0]
