"""What a run says that goes on from a folder, or has nothing left to do there."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any, List, Tuple

import pytest

from ..pool import Pools, Shape
from .loops import EPOCHS, make, run


def goes_on(folder: str, epochs: int = EPOCHS, **options: Any) -> Tuple[bool, str]:
    """Whether something is left, and what was printed."""
    from gluon_esgd.checkpoint import go_on

    state = make(folder)[2]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        is_left = go_on(state, epochs, options, "--output NEW")
    return is_left, said.getvalue()


def test_a_run_that_begins_says_nothing_and_keeps_its_options(tmp_path: Path) -> None:
    assert goes_on(str(tmp_path / "run"), lr=0.1, path=Path("a")) == (True, "")
    assert json.loads((tmp_path / "run" / "options.json").read_text()) == {"lr": 0.1, "path": "a"}


def test_a_run_that_goes_on_says_where_and_what_has_changed(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert goes_on(folder, lr=0.1, seed=0, mixup=0.2)[1] == ""
    run(folder, stop=(1, 4), every_steps=3)
    place = f"goes on from epoch 1, batch 3 ({folder}/client0)\n"
    assert goes_on(folder, lr=0.1, seed=0, mixup=0.2) == (True, place)
    changed = "not as in the run before: lr 0.1, now 0.5; mixup 0.2, now unset\n"
    assert goes_on(folder, lr=0.5, seed=0) == (True, place + changed)
    assert goes_on(folder, lr=0.5, seed=0) == (True, place), "that is the run before now"


def test_a_run_with_nothing_left_says_so_each_time(tmp_path: Path) -> None:
    folder = str(tmp_path)
    goes_on(folder, lr=0.1)
    run(folder)
    done = f"nothing left: all 3 epochs were done in {folder}/client0; --output NEW for a new run\n"
    changed = "not as in the run before: lr 0.1, now 0.5\n"
    for _ in range(2):
        assert goes_on(folder, lr=0.5) == (False, done + changed)
    left, said = goes_on(folder, epochs=EPOCHS + 1, lr=0.1)
    assert left and said.startswith("goes on from epoch 3, batch 0")


@pytest.mark.parametrize("content", [None, b"\xff{", b"[1]", b"3"])
def test_options_of_others_are_no_reason_to_stop(tmp_path: Path, content: Any) -> None:
    run(str(tmp_path), stop=(1, 4))
    if content is not None:
        (tmp_path / "options.json").write_bytes(content)
    assert goes_on(str(tmp_path), lr=0.5)[1].count("\n") == 1


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "options.json").mkdir()
    with pytest.raises(OSError, match=r"options\.json"):
        goes_on(str(tmp_path), lr=0.5)


@pytest.mark.servers
def test_one_rank_speaks_and_a_center_that_came_along_is_one(pools: Pools, tmp_path: Path) -> None:
    pool = pools.get(Shape(2, clients=2, servers=1, rule="esgd"))
    before = pool.run(shows_center, str(tmp_path / "new"))
    assert all("has not exchanged" in text for _, text in before)
    pool.run(ends, str(tmp_path / "run"))
    after = pool.run(shows_center, str(tmp_path / "run"))
    assert ["nothing left: all 3 epochs" in said for said, _ in after] == [True, False]
    assert after[1][0] == ""
    assert not any("has not exchanged" in text for _, text in after)


def ends(folder: str) -> None:
    run(folder, interval=2)


def shows_center(folder: str) -> Tuple[str, str]:
    """What was printed and logged up to the center of a run that makes no step."""
    from gluon_esgd.checkpoint import go_on

    _, trainer, state, _ = make(folder, interval=2)
    said, logged = io.StringIO(), Logged()
    logging.getLogger("gluon_esgd").addHandler(logged)
    try:
        with contextlib.redirect_stdout(said):
            go_on(state, EPOCHS, {})
        with trainer.center():
            pass
    finally:
        logging.getLogger("gluon_esgd").removeHandler(logged)
    return said.getvalue(), "\n".join(logged.lines)


class Logged(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.lines.append(record.getMessage())
