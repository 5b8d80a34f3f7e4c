"""Tables of the cost model for clusters that nobody measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gluon_esgd.predict import Constants

from .pool import ROOT

SCRIPT = str(ROOT / "benchmarks" / "larger.py")


def run(*options: str) -> str:
    command = [sys.executable, SCRIPT, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_each_cluster_is_told_with_what_it_assumes(tmp_path: Path):
    output = tmp_path / "larger.json"
    said = run("--output", str(output))
    found = json.loads(output.read_text())
    assert [case["name"] for case in found["cases"]] == list(found["predicted"])
    for case in found["cases"]:
        assert f"**{case['name']}**, predicted: {case['assumes']}" in said
        rows = {row["name"]: row for row in found["predicted"][case["name"]]}
        assert len(rows) == 8 and rows["MPI"]["interval"] is None
        assert rows["mpi-ESGD"]["step_s"] < rows["mpi-SGD"]["step_s"] < rows["dist-SGD"]["step_s"]
        assert all(row["epoch_s"] > row["step_s"] > 0.25 for row in rows.values())


def test_it_takes_the_constants_of_a_calibration(tmp_path: Path):
    slow = tmp_path / "constants.json"
    document = {"version": 1, "constants": vars(Constants(efficiency=0.1))}
    slow.write_text(json.dumps(document))
    assert run("--calibration", str(slow)) != run()
