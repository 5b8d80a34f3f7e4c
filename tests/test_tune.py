"""``gluon-esgd tune`` measures, shows and writes a table, and leaves nothing else behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List

import pytest

from gluon_esgd.cli import main
from gluon_esgd.collectives.registry import COLLECTIVES
from gluon_esgd.collectives.tuning import load
from gluon_esgd.tune import results
from gluon_esgd.tune.request import SIZES, size_text

from .pool import OPEN_MPI_PYTHON, ROOT, Pool, Shape, environment, mpiexec

KB, MB = 1 << 10, 1 << 20
PYTHONS = [sys.executable, OPEN_MPI_PYTHON]
VENDORS = ["mpich", "openmpi"]


def ranks(*machines: int) -> Any:
    """What the results look at in a communicator: machines of so many ranks each."""
    return SimpleNamespace(nodes=[[0] * n for n in machines], size=sum(machines))


def run(*argv: str, folder: Path, python: str = sys.executable, **more: str) -> Any:
    """Run a command to its end, temporary files in `folder`."""
    return subprocess.run(
        [python, "-m", *argv],
        cwd=ROOT,
        env=environment(TMPDIR=str(folder), XDG_CONFIG_HOME=str(folder), **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.fixture(autouse=True)
def _no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GLUON_ESGD_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("by_name", "chosen"),
    [
        ({"shared": [10, 10, 10, 10], "ring": [9, 9, 9, 9]}, "ring"),
        ({"shared": [10, 10, 10, 10], "ring": [9.6, 9.6, 9.6, 9.6]}, "shared"),  # 4 per cent
        ({"shared": [10, 10, 10, 10], "ring": [1, 1, 11, 11]}, "shared"),  # in half of the rounds
        ({"shared": [10, 10, 10, 10], "ring": [1, 1, 1, 99]}, "ring"),
        ({"shared": [10, 10, 10], "ring": [9, 9, 9], "library": [8, 8, 8]}, "library"),
        ({"ring": [9], "library": [8]}, "library"),  # the built-in choice was not measured
        ({"shared": [5]}, "shared"),
    ],
)
def test_the_built_in_choice_stays_unless_another_is_clearly_faster(
    by_name: Dict[str, List[float]], chosen: str
) -> None:
    assert results.fastest(by_name, "shared") == chosen


def samples(*winners: str, start: int = KB) -> Dict[int, Dict[str, List[float]]]:
    """Times at `start` and sizes of 4 times each, at which these are clearly the fastest."""
    return {
        start * 4**k: {name: [1.0 if name == winner else 9.0] for name in ("ring", "shared")}
        for k, winner in enumerate(winners)
    }


def test_choices_change_between_the_sizes() -> None:
    made = results.choices_of({"allreduce": samples("ring", "shared", "ring")}, ranks(2))
    assert made == {"allreduce": [[2 * KB, "ring"], [8 * KB, "shared"], [32 * KB, "ring"]]}


def test_the_last_choice_has_no_end_where_vectors_were_large() -> None:
    made = results.choices_of({"broadcast": samples("ring", "ring", start=4 * MB)}, ranks(2))
    assert made == {"broadcast": [[None, "ring"]]}


@pytest.mark.parametrize("machines", [(2,), (2, 3), (1, 1, 1)])
def test_what_is_written_is_read(tmp_path: Path, machines: tuple) -> None:
    path = str(tmp_path / "table.json")
    by_size = {KB: {"library": [3.0], "ring": [9.0]}, 64 * MB: {"library": [9.0], "ring": [3.0]}}
    new = results.describe({"allreduce": by_size}, ranks(*machines), "MPICH 5")
    results.write(path, new)
    table, document = load(path)
    shape = len(machines), min(machines)
    assert table.choose("allreduce", KB, shape) == "library"
    assert table.choose("allreduce", 64 * MB, shape) == "ring"
    assert table.choose("broadcast", KB, shape) is None
    measured = document["measured"][f"{shape[0]}x{shape[1]}"]
    assert measured["microseconds"]["allreduce"]["1024"] == {"library": 3.0, "ring": 9.0}
    assert measured["mpi"] == "MPICH 5" and measured["ranks"] == sum(machines)
    assert '{"library": 3.0, "ring": 9.0}' in Path(path).read_text()  # a row is a line


def test_other_shapes_in_the_file_stay(tmp_path: Path) -> None:
    path = str(tmp_path / "table.json")
    for machines, winner in [((2,), "ring"), ((4,), "ring"), ((2,), "shared")]:
        new = results.describe({"allreduce": samples(winner)}, ranks(*machines), "MPICH 5")
        results.write(path, results.merge(path, new))
    table = load(path)[0]
    assert table.choose("allreduce", KB, (1, 2)) == "shared"
    assert table.choose("allreduce", KB, (1, 4)) == "ring"


@pytest.mark.parametrize("old", ["{", '{"version": 0}', '{"version": 1, "choices": 3}'])
def test_a_broken_file_is_replaced(tmp_path: Path, old: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(old)
    new = results.describe({"allreduce": samples("ring")}, ranks(2), "MPICH 5")
    results.write(str(path), results.merge(str(path), new))
    assert list(json.loads(path.read_text())["choices"]) == ["1x2"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    path.write_text("old")

    def interrupted(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.write(str(path), {"version": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]
    assert path.read_text() == "old"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "table.json")
    results.write(str(link), {"version": 1})
    assert link.is_symlink() and json.loads((tmp_path / "table.json").read_text())


def test_sizes_are_shown_as_people_write_them() -> None:
    assert [size_text(n) for n in (*SIZES[:2], SIZES[-1], 1000)] == ["1K", "4K", "64M", "1000"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-n", "1"], "-n '1' must be numbers of ranks of at least 2, as 2,4"),
        (["-n", "2,x"], "-n '2,x' must be numbers of ranks"),
        (["--sizes", "3"], "--sizes '3' must be bytes from 4 to 16G, as 1K,64K,16M"),
        (["--sizes", "1T"], "--sizes '1T' must be bytes"),
        (["--sizes", "17G"], "--sizes '17G' must be bytes"),
        (["--time-limit", "soon"], "--time-limit 'soon' must be seconds above 0"),
        (["--time-limit", "nan"], "--time-limit 'nan' must be seconds"),
        (["-n", "2,3", "--time-limit", "9"], "--time-limit 9 is too short: give at least 10"),
        (["--output", ""], "--output '' must be the name of a file"),
        (["--output", "/proc/none/table"], "/proc/none/table cannot be written: /proc/none: No"),
        (["--output", "/proc"], "/proc cannot be written: it is a folder; give another file"),
        (["--mpiexec", "/none"], "'/none' is not a program"),
        (["-n", "1", "--sizes", "x"], "2 faults"),
    ],
)
def test_bad_arguments_are_told(argv: List[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", *argv]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out


def test_a_setting_that_is_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("GLUON_ESGD_TUNING", "")
    assert main(["tune"]) == 2
    assert "GLUON_ESGD_TUNING='' must be a text that is not empty" in capsys.readouterr().err


@pytest.mark.mpi
def test_the_launcher_hands_the_table_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("GLUON_ESGD_TUNING", "/some/table.json")
    assert main(["run", "-n", "2", "--dry-run", sys.executable, "-V"]) == 0
    assert "GLUON_ESGD_TUNING=/some/table.json" in capsys.readouterr().out


@pytest.mark.mpi
@pytest.mark.parametrize("python", PYTHONS, ids=VENDORS)
def test_a_table_of_this_machine_and_a_job_that_takes_it(tmp_path: Path, python: str) -> None:
    flags = ["-n", "2", "--sizes", "1K,64K", "--time-limit", "10"]
    done = run("gluon_esgd.cli", "tune", *flags, folder=tmp_path, python=python)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "gluon_esgd" / "tuning.json"
    assert f"wrote {path}\n" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["gluon_esgd"]
    document = load(str(path))[1]
    assert sorted(document["choices"]["1x2"]) == sorted(COLLECTIVES)
    measured = document["measured"]["1x2"]
    assert measured["mpi"].startswith("MPICH" if python == sys.executable else "Open MPI")
    for collective, by_size in measured["microseconds"].items():
        assert list(by_size) == ["1024", "65536"]
        assert {"library", "shared"} <= set(by_size["1024"]), collective
        assert min(value for by_name in by_size.values() for value in by_name.values()) > 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0][:5] == ["2", "ranks", "on", "1", "machine,"]
    assert [row[0] for row in rows if row and row[0] in COLLECTIVES] == list(COLLECTIVES)
    assert sum("*" in row for row in rows) == 2 * len(COLLECTIVES)


@pytest.mark.mpi
def test_measured_inside_a_job_of_declared_machines(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    command = [sys.executable, "-m", "gluon_esgd.tune", "--output", str(path), "--sizes", "1K"]
    done = subprocess.run(
        [*mpiexec(sys.executable), "-n", "3", *command, "--time-limit", "3"],
        cwd=ROOT,
        env=environment(GLUON_ESGD_NODES="2,1", XDG_CONFIG_HOME=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert f"auto follows it where GLUON_ESGD_TUNING={path} is set" in done.stderr
    measured = load(str(path))[1]["measured"]["2x1"]["microseconds"]
    assert sorted(measured["allreduce"]["1024"]) == ["hierarchical", "library", "ring"]
    assert done.stdout.startswith("3 ranks on 2 machines")


@pytest.mark.mpi
def test_what_cannot_be_written_is_told_once_and_before(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gluon_esgd.tune", "--output", str(tmp_path)]
    done = subprocess.run(
        [*mpiexec(sys.executable), "-n", "2", *command],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.count("cannot be written: it is a folder") == 1


def test_one_rank_has_nothing_to_measure(tmp_path: Path) -> None:
    done = run("gluon_esgd.tune", folder=tmp_path)
    assert done.returncode == 2
    assert "there is one rank only; start several with mpiexec" in done.stderr


def _until(process: subprocess.Popen, found: Callable[[str], bool]) -> None:
    """Read what the process says until a line is `found`."""
    assert process.stderr is not None
    for line in process.stderr:
        if found(line):
            return
    raise AssertionError("it ended before")


@pytest.mark.mpi
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gluon_esgd.cli", "tune", "-n", "2"],
        cwd=ROOT,
        env=environment(TMPDIR=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _until(process, lambda line: "round" in line)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.communicate(timeout=30)[1]
        assert process.returncode == 130
        assert "ended by Ctrl-C" in rest and "Traceback" not in rest
    finally:
        process.kill()
        process.wait()
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    left = [
        path
        for path in Path("/proc").glob("[0-9]*/environ")
        if f"TMPDIR={tmp_path}" in _content(path)
    ]
    assert left == []


def _content(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _room_for(nbytes: int) -> List[List[int]]:
    """The sizes that are left, and those measured, where shared memory has that much room."""
    from unittest import mock

    from gluon_esgd import world
    from gluon_esgd.tune import measure

    said: List[str] = []
    usage = SimpleNamespace(free=nbytes)
    with mock.patch.object(measure.shutil, "disk_usage", lambda path: usage):
        made = measure.measure(world().comm, (KB, 4 * KB, 16 * KB), 20.0, said.append)
    assert said[:1] == ["not enough room in /dev/shm for vectors above 4K"]
    return [list(by_size) for by_size in made.values()]


def _no_time() -> List[str]:
    from gluon_esgd import world
    from gluon_esgd.tune import measure

    said: List[str] = []
    made = measure.measure(world().comm, (KB, 16 * KB), 0.0, said.append)
    assert [list(by_size) for by_size in made.values()] == [[KB]] * 4
    return said


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2)], ids=lambda s: s.workers)
def test_the_largest_are_left_out_where_room_or_time_is_short(pools: Any, shape: Shape) -> None:
    pool: Pool = pools.get(shape)
    assert pool.run(_room_for, 2 * 2 * 8 * KB) == [[[KB, 4 * KB]] * 4] * 2
    assert pool.run(_no_time) == [["not enough time for vectors above 1K"]] * 2
