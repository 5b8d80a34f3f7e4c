"""The benchmark of the recipe, as small as it goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from .pool import ROOT, environment

SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "recipe.py"), "--model", "small"]


def run(*options: Any) -> subprocess.CompletedProcess:
    argv = [*SCRIPT, "--image-size", "8", "--batch-size", "2", "--rounds", "1", *map(str, options)]
    return subprocess.run(
        argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=110
    )


def test_what_it_says_and_writes(tmp_path: Path) -> None:
    output = tmp_path / "recipe.json"
    done = run("--steps", 22, "--output", output)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["steps"] == {"bare": 22, "recipe": 22}
    rates = [result[name] for name in ("bare", "recipe")]
    assert [len(rounds) for rounds in rates] == [1, 1] and min(map(min, rates)) > 0
    assert result["ratio"] == pytest.approx(median(rates[1]) / median(rates[0]))
    assert {"command", "machine", "versions", "date"} <= set(result) and "input" not in result
    for said in ("bare ", "recipe ", "images/s", "median of 1 pairs"):
        assert said in done.stdout


def test_steps_that_would_all_be_left_out() -> None:
    done = run("--steps", 20)
    assert done.returncode == 2 and "--steps 20 must be above 20" in done.stderr
