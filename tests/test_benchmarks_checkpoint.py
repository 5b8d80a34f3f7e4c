"""The benchmark of checkpoints runs, and says what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .pool import ROOT, environment


def test_what_it_says_and_writes(tmp_path: Path) -> None:
    output = tmp_path / "checkpoint.json"
    small = ["--model", "mobilenet0.25", "--image-size", "32", "--batch-size", "2"]
    counts = ["--steps", "1", "--rounds", "1", "--output", str(output)]
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint.py"), *small, *counts]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    for name in ("background", "at once", "Gluon's two files"):
        assert name in done.stdout
        wait_s = result[name]["wait_s"]
        assert wait_s > 0
        assert result[name]["wait_of_a_step"] == wait_s / result["step_s"]
