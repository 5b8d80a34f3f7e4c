"""Data are shared anew where an epoch starts and clients have come or gone."""

from __future__ import annotations

import os
from typing import Any, ClassVar, List, Tuple

import pytest

from gluon_esgd.checkpoint.content import read
from gluon_esgd.checkpoint.folder import entries, folder_of
from gluon_esgd.data import ShardSampler

from . import loops


class Follower(ShardSampler):
    """Hears of clients what the test says, and notes when it is asked to."""

    now: Tuple[int, int] = (1, 0)
    asked: ClassVar[List[int]] = []

    def share_anew(self) -> Tuple[int, int]:
        type(self).asked.append(self.epoch)
        return self.now


@pytest.fixture
def follower(monkeypatch: Any) -> Any:
    monkeypatch.setattr("gluon_esgd.data.ShardSampler", Follower)
    monkeypatch.setattr(Follower, "asked", [])
    return Follower


def last(folder: str) -> Any:
    path = entries(folder_of(folder, 0))[0].path
    with open(path, "rb") as file:
        return read(file.read(), os.path.basename(path))


def test_an_epoch_that_goes_on_keeps_its_shares_and_the_next_is_shared_anew(
    follower: Any, tmp_path: Any
) -> None:
    assert loops.run(str(tmp_path), stop=(1, 5), every_steps=1) is None
    assert len(follower.asked) == 2
    outcome = loops.run(str(tmp_path), every_steps=1)
    assert outcome is not None and outcome.seen[0] == (1, 5)
    assert len(follower.asked) == 3  # at the start of epoch 2 only


@pytest.mark.parametrize(("now", "noted"), [((3, 0), 3), ((2, 1), 0)])
def test_an_epoch_of_other_shares_begins_again(
    follower: Any, tmp_path: Any, monkeypatch: Any, now: Tuple[int, int], noted: int
) -> None:
    monkeypatch.setattr(follower, "now", now)
    assert loops.run(str(tmp_path), stop=(1, 5), every_steps=1) is None
    assert (last(str(tmp_path)).num_clients, last(str(tmp_path)).batch) == (noted, 5)
    monkeypatch.setattr(follower, "now", (1, 0))
    outcome = loops.run(str(tmp_path))
    assert outcome is not None and outcome.seen[0] == (1, 0)
    assert last(str(tmp_path)).num_clients == 1
