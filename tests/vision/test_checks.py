"""Records are checked before the run, by one rank of each machine, and ranks hear of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, List

import pytest

from gluon_esgd.data import pack_folder
from gluon_esgd.vision import open_pictures, record_source, together

from ..data.packs import colours
from ..data.pictures import InThisProcess, write_pictures
from ..pool import Shape


def opened(folders: List[str]) -> str:
    """What this rank is told of its machine's copy."""
    from gluon_esgd import world

    try:
        open_pictures(folders[world().rank], batch_size=1, image_size=8)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.mpi
def test_all_ranks_hear_what_the_first_of_a_machine_finds(pools: Any, tmp_path: Path) -> None:
    sound, cut = tmp_path / "sound", tmp_path / "cut"
    sound.mkdir()
    for name in ("train", "val"):
        write_pictures(sound / f"{name}.rec", 8)
    shutil.copytree(sound, cut)
    os.truncate(cut / "val.rec", os.path.getsize(cut / "val.rec") - 4)
    pool = pools.get(Shape(2))
    said = pool.run(opened, [str(cut), str(sound)])
    says = f"{cut / 'val.rec'} is not fit for a run"
    assert said[0].startswith(f"ValueError: {says}")
    assert said[1].startswith(f"ValueError: rank 0: {says}")
    assert "val.rec: record 7 at byte" in said[1]
    assert pool.run(opened, [str(sound)] * 2) == ["fine"] * 2


def test_files_as_packed_are_not_gone_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gluon_esgd.data.packing.PicturePool", InThisProcess)
    pack_folder(colours(tmp_path / "pictures", 5), tmp_path / "made", validation=0.4)
    walked: List[str] = []
    monkeypatch.setattr(
        record_source, "check_records", lambda path, progress: walked.append(os.path.basename(path))
    )
    for _ in range(2):
        open_pictures(str(tmp_path / "made"), batch_size=1, image_size=8)
        assert walked == []
    (tmp_path / "made" / "packed.json").unlink()
    open_pictures(str(tmp_path / "made"), batch_size=1, image_size=8)
    assert walked == ["train.rec", "val.rec"]


def test_ranks_hear_of_each_other_while_a_check_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_ROUND_S", 0.01)
    rounds: List[Any] = []
    enough, done = Event(), Event()

    def allgather(value: Any, what: str) -> List[Any]:
        rounds.append(value)
        if len(rounds) == 6:
            enough.set()
        return [value]

    def action() -> None:
        assert enough.wait(20)
        done.set()

    me: Any = SimpleNamespace(local_rank=0, allgather=allgather)
    together.on_each_machine(me, action, "a check")
    assert done.is_set() and rounds[-1] is False and len(rounds) >= 6


def test_only_the_first_of_a_machine_looks_and_waits_for_the_others() -> None:
    answers = iter([[None, None], [True, False], [None, None], [False, False]])
    me: Any = SimpleNamespace(local_rank=1, allgather=lambda value, what: next(answers))
    together.on_each_machine(me, lambda: pytest.fail("another rank does"), "a check")
    assert next(answers, None) is None


def test_any_fault_is_raised_and_tells_its_rank() -> None:
    me: Any = SimpleNamespace(
        local_rank=1, allgather=lambda value, what: [None, None, ["OSError", "no disk"], value]
    )
    with pytest.raises(OSError, match=r"^rank 2: no disk"):
        together.on_each_machine(me, lambda: None, "a check")
    with pytest.raises(RuntimeError, match=r"^mine$"):
        together.raise_on_all(me, RuntimeError("mine"), "a check")
