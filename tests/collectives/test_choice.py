"""``auto`` follows the table of ``gluon-esgd tune``, and does without one that is no good."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator, List, Optional

import numpy as np
import pytest

from gluon_esgd.collectives import plan, tuning
from gluon_esgd.collectives.choice import choose, default
from gluon_esgd.collectives.tuning import Table, load, serves
from gluon_esgd.communicator import Communicator
from gluon_esgd.settings import own_tuning_path

from ..pool import OPEN_MPI_PYTHON, Pool, Shape, label, until

KB, MB = 1 << 10, 1 << 20
STEPS = [[64 * KB, "ring"], [MB, "library"], [None, "shared"]]


def ranks(*machines: int, rank: int = 0) -> Any:
    """What a choice looks at in a communicator: machines of so many ranks each."""
    starts = [sum(machines[:k]) for k in range(len(machines))]
    nodes = [list(range(a, a + n)) for a, n in zip(starts, machines)]
    return SimpleNamespace(nodes=nodes, size=sum(machines), rank=rank)


def document(choices: Any, version: Any = 1) -> dict:
    return {"version": version, "choices": choices}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """The table is read once in a process; here once in a test."""
    tuning._table.cache_clear()
    yield
    tuning._table.cache_clear()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a table where the setting says; return its path."""

    def to(text: Any) -> Path:
        path = tmp_path / "table.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        monkeypatch.setenv("GLUON_ESGD_TUNING", str(path))
        return path

    return to


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a table; return where it would lie."""
    monkeypatch.delenv("GLUON_ESGD_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "gluon_esgd" / "tuning.json"


@pytest.mark.parametrize(
    ("machines", "collective", "nbytes", "chosen"),
    [
        ((1,), "allreduce", MB, "local"),
        ((2,), "allreduce", 4, "shared"),
        ((4,), "broadcast", 64 * MB, "shared"),
        ((2, 2), "allreduce", KB, "library"),
        ((2, 2), "allreduce", MB, "hierarchical"),
        ((3, 1), "allreduce", MB, "ring"),
        ((2, 2), "broadcast", MB, "library"),
        ((2, 2), "broadcast", 2 * MB, "hierarchical"),
        ((2, 1), "broadcast", 64 * MB, "chain"),
        ((1, 1), "allgather", 64 * MB, "ring"),
    ],
)
def test_without_a_table_the_built_in_choices_hold(
    nothing: Path,
    caplog: pytest.LogCaptureFixture,
    machines: tuple,
    collective: str,
    nbytes: int,
    chosen: str,
) -> None:
    assert choose(collective, nbytes, ranks(*machines)) == chosen
    assert not caplog.records


def test_a_world_of_one_rank_needs_no_table(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    write("{")
    vector = np.ones(3, np.float32)
    assert plan("allreduce", vector, Communicator()).algorithm == "local"
    assert not caplog.records


def test_the_table_is_followed_by_size_and_collective(write: Any) -> None:
    write(document({"1x2": {"allreduce": STEPS}}))
    for nbytes, chosen in [
        (0, "ring"),
        (64 * KB, "ring"),
        (64 * KB + 1, "library"),
        (MB, "library"),
        (MB + 1, "shared"),
        (1 << 40, "shared"),
    ]:
        assert choose("allreduce", nbytes, ranks(2)) == chosen, nbytes
    assert choose("broadcast", KB, ranks(2)) == "shared"


def test_above_the_last_bound_the_built_in_choices_hold(write: Any) -> None:
    write(document({"1x2": {"allreduce": [[KB, "ring"]]}}))
    assert choose("allreduce", KB, ranks(2)) == "ring"
    assert choose("allreduce", KB + 1, ranks(2)) == "shared"


def test_the_user_has_a_table_of_their_own(nothing: Path) -> None:
    nothing.parent.mkdir()
    nothing.write_text(json.dumps(document({"1x2": {"allreduce": STEPS}})))
    assert own_tuning_path() == str(nothing)
    assert choose("allreduce", KB, ranks(2)) == "ring"


@pytest.mark.parametrize("folder", ["", "relative/folder"])
def test_the_own_place_without_a_folder_for_settings(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", folder)
    monkeypatch.setenv("HOME", "/home/me")
    assert own_tuning_path() == "/home/me/.config/gluon_esgd/tuning.json"


def test_only_rank_0_looks(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    write("{")
    assert choose("allreduce", KB, ranks(2, rank=1)) == "shared"
    assert not caplog.records


@pytest.mark.parametrize(
    ("measured", "machines", "taken"),
    [
        (["1x2", "1x4"], (3,), "1x4"),  # 4/3 is nearer than 3/2
        (["1x2", "1x8"], (4,), "1x2"),  # of two alike the smaller one
        (["1x2", "1x4"], (8,), "1x4"),
        (["1x2", "1x4"], (9,), None),
        (["1x2"], (2, 2), None),
        (["2x2"], (3, 2), "2x2"),  # the smallest machine counts
        (["2x2"], (2, 2, 2), None),
    ],
)
def test_a_shape_that_was_not_measured(
    measured: List[str], machines: tuple, taken: Optional[str]
) -> None:
    bounds = {key: 1000 + k for k, key in enumerate(measured)}
    table = Table(document({key: {"allreduce": [[bounds[key], "ring"]]} for key in measured}))
    shape = tuning.shape_of(ranks(*machines))
    found = [b for b in range(999, 1010) if table.choose("allreduce", b, shape) == "ring"]
    assert max(found, default=None) == (None if taken is None else bounds[taken])


def entry(*steps: Any, shape: str = "1x2") -> dict:
    return document({shape: {"allreduce": list(steps)}})


BROKEN = [
    ("", "line 1"),
    ("{", "line 1"),
    ("[" * 100_000, "nested too deep"),
    ("\udcff", "utf-8"),
    ([], "version: None is not 1"),
    (document({}, version=2), "version: 2 is not 1"),
    (document(None), "choices must be an object"),
    (document({"two": {}}), "'two' must be MACHINESxRANKS"),
    (document({"0x2": {}}), "'0x2' must be MACHINESxRANKS"),
    (document({"1x2": []}), "choices, 1x2 must be an object"),
    (document({"1x2": {"alltoall": []}}), "1x2, alltoall: must be one of allreduce"),
    (document({"1x2": {"allreduce": "ring"}}), "1x2, allreduce must be a list, got 'ring'"),
    (entry("ring"), "allreduce, entry 0 must be [up to bytes or null, algorithm], got 'ring'"),
    (entry([KB, 3]), "entry 0 must be [up to bytes"),
    (entry([KB, "ring"], [KB, "shared"]), "entry 1: bounds must be ascending"),
    (entry([None, "ring"], [KB, "shared"]), "entry 0: bounds must be ascending"),
    (entry([True, "ring"]), "entry 0: bounds must be ascending"),
    (entry([1.5, "ring"]), "entry 0: bounds must be ascending"),
    (entry([None, "rings"]), "'rings' must be one of hierarchical, library, ring, shared"),
    (entry([None, "auto"]), "'auto' must be one of"),
    (entry([None, "local"]), "'local' must be one of"),
    (entry([None, "shared"], shape="2x2"), "'shared' must be one of hierarchical, library, ring"),
]


@pytest.mark.parametrize(("content", "place"), BROKEN)
def test_a_table_that_is_no_good_is_one_warning_and_no_error(
    write: Any, caplog: pytest.LogCaptureFixture, content: Any, place: str
) -> None:
    if content == "\udcff":
        path = write("")
        path.write_bytes(b"\xff")
    else:
        path = write(content)
    for _ in range(2):
        assert choose("allreduce", KB, ranks(2)) == "shared"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    said = record.getMessage()
    assert str(path) in said and place in said
    assert "run `gluon-esgd tune` again, or change GLUON_ESGD_TUNING" in said
    with pytest.raises(ValueError):
        load(str(path))


def test_a_table_that_was_named_and_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GLUON_ESGD_TUNING", str(tmp_path))
    assert choose("allreduce", KB, ranks(2)) == "shared"
    tuning._table.cache_clear()
    monkeypatch.setenv("GLUON_ESGD_TUNING", str(tmp_path / "none.json"))
    assert choose("allreduce", KB, ranks(2)) == "shared"
    first, second = (record.getMessage() for record in caplog.records)
    assert "Is a directory" in first
    assert "none.json" in second and "No such file" in second


def test_the_remedy_for_the_users_own_table(
    nothing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing.parent.mkdir()
    nothing.write_text("{")
    assert choose("allreduce", KB, ranks(2)) == "shared"
    assert "or remove the file" in caplog.text


def test_what_serves_is_what_a_default_may_be() -> None:
    for machines in [(2,), (4,), (2, 2), (3, 1), (1, 1, 1)]:
        for collective in ("allreduce", "broadcast", "reduce_scatter", "allgather"):
            for nbytes in (4, MB, 64 * MB):
                name = default(collective, nbytes, ranks(*machines))
                assert serves(collective, name, len(machines))


def _taken(path: Optional[str] = None) -> List[str]:
    """What `plan` takes for 4 KB and for 1 MB; with `path` it is rank 0 that has this table."""
    import os

    from gluon_esgd import world

    if path is not None:
        os.environ["GLUON_ESGD_TUNING"] = path if world().rank == 0 else path + ".none"
    tuning._table.cache_clear()
    sizes = (KB, MB // 4)
    return [plan("allreduce", np.zeros(size, np.float32), world().comm).algorithm for size in sizes]


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2), Shape(2, python=OPEN_MPI_PYTHON)], ids=label)
def test_plans_of_all_ranks_follow_the_table(tmp_path: Path, shape: Shape) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(document({"1x2": {"allreduce": STEPS[:1] + STEPS[2:]}})))
    pool = Pool(shape._replace(settings=(("GLUON_ESGD_TUNING", str(path)),)))
    try:
        assert pool.run(_taken) == [["ring", "shared"]] * 2
        path.write_text("broken")
        assert pool.run(_taken) == [["shared", "shared"]] * 2
        said = "is not used, but the built-in choices"
        until(lambda: said in pool.said(), 10.0)  # mpiexec passes it on when it comes to it
        assert pool.said().count(said) == 1
        path.write_text(json.dumps(document({"1x2": {"allreduce": STEPS}})))
        assert pool.run(_taken, str(path)) == [["ring", "library"]] * 2
    finally:
        pool.end()
