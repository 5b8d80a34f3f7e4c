"""Memory that processes map together, without MPI."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import weakref
from pathlib import Path
from typing import List

import numpy as np
import pytest

from gluon_esgd import node_memory
from gluon_esgd.node_memory import Mapping, create, create_anywhere, mapping_of, reserve

PAGE = mmap.PAGESIZE


def _two_of(count: int, nbytes: int) -> List[Mapping]:
    """What two ranks see of the same file, each with another part for its own."""
    file, path = create(count * nbytes)
    os.unlink(path)
    reserve(file, 0, count * nbytes)
    made = [Mapping.over(file, nbytes, count, own, name="a") for own in range(2)]
    os.close(file)
    return made


def test_parts_are_shared_by_those_who_map_the_file() -> None:
    first, second = _two_of(3, PAGE)
    for k, part in enumerate(first.parts):
        assert part.nbytes == PAGE and not part.any()
        part[:] = k + 1
    assert [sorted(set(part.tolist())) for part in second.parts] == [[1], [2], [3]]
    assert (first.own, second.own) == (0, 1) and first.name == second.name == "a"


def test_a_mapping_tells_where_in_the_own_part_an_array_lies() -> None:
    _, second = _two_of(3, PAGE)
    own = second.parts[1]
    floats = own.view(np.float32)
    assert second.locate(own) == 0 and second.locate(floats[5:]) == 20
    assert second.locate(floats[-1:]) == PAGE - 4
    assert second.locate(second.parts[0]) is None and second.locate(second.parts[2]) is None
    assert second.locate(np.ones(3)) is None
    over_two_parts = np.frombuffer(second, np.uint8, 2 * PAGE, PAGE)
    assert second.locate(over_two_parts) is None


def test_the_mapping_of_an_array_is_found_through_its_views() -> None:
    mapping = Mapping.over(-1, PAGE, 1, 0)
    array = mapping.parts[0].view(np.float32)
    for view in (array, array[3:], array.reshape(4, -1), array.reshape(4, -1)[1:, ::2].T):
        assert mapping_of(view) is mapping


def test_private_memory_has_no_mapping() -> None:
    other = mmap.mmap(-1, PAGE)
    arrays = [np.ones(3), np.ones(3)[1:], np.frombuffer(bytes(8)), np.frombuffer(other, np.uint8)]
    assert [mapping_of(array) for array in arrays] == [None] * 4


def test_a_mapping_lives_as_long_as_its_last_array() -> None:
    mapping = Mapping.over(-1, PAGE, 1, 0)
    gone = weakref.ref(mapping)
    view = mapping.parts[0].view(np.int64)[2:]
    del mapping
    gc.collect()
    assert gone() is not None
    view[0] = 7
    assert view[0] == 7
    del view
    gc.collect()
    assert gone() is None


def test_a_file_lies_in_memory_under_the_name_of_the_library() -> None:
    file, path = create(0)
    try:
        assert os.path.dirname(path) == "/dev/shm"
        assert os.path.basename(path).startswith("gluon_esgd_")
        assert os.fstat(file).st_size == 0 and os.fstat(file).st_mode & 0o077 == 0
    finally:
        os.close(file)
        os.unlink(path)


def _no_room(file: int, start: int, nbytes: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_room_is_taken_at_once_and_its_lack_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, path = create(0)
    os.unlink(path)
    try:
        reserve(file, PAGE, PAGE)
        assert os.fstat(file).st_size == 2 * PAGE
        assert os.fstat(file).st_blocks * 512 >= PAGE
        monkeypatch.setattr(os, "posix_fallocate", _no_room)
        with pytest.raises(OSError, match="4096 bytes of memory: No space left on device") as error:
            reserve(file, 0, 4096)
        assert error.value.errno == errno.ENOSPC
    finally:
        os.close(file)


def test_a_small_file_is_made_on_a_disk_where_memory_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node_memory, "_FOLDER", str(tmp_path / "missing"))
    file, path = create_anywhere(100)
    os.close(file)
    assert os.path.getsize(path) == 100 and not path.startswith(str(tmp_path))
    os.unlink(path)


def test_and_where_memory_is_full_nothing_is_left_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take = os.posix_fallocate
    answers = [_no_room, take]
    monkeypatch.setattr(node_memory, "_FOLDER", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: answers.pop(0)(*args))
    file, path = create_anywhere(100)
    os.close(file)
    assert os.path.getsize(path) == 100
    assert os.listdir(tmp_path) == []
    os.unlink(path)


def test_where_there_is_room_a_small_file_lies_in_memory() -> None:
    file, path = create_anywhere(100)
    os.close(file)
    assert path.startswith("/dev/shm/gluon_esgd_") and os.path.getsize(path) == 100
    os.unlink(path)
