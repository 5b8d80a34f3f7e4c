"""Processes of a real job are killed while it trains: it recovers, and ends as if undisturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .pool import ROOT, environment


@pytest.mark.servers
@pytest.mark.timeout(400)
def test_a_job_whose_processes_are_killed_comes_to_the_same_loss(tmp_path: Path) -> None:
    output = tmp_path / "chaos.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--output", str(output)]
    done = subprocess.run(
        [*command, "--clients", "2", "--servers", "1", "--kills", "3",
         "--kinds", "rank", "server", "agent"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=390,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    disturbed = result["disturbed"]
    assert sorted(kill["kind"] for kill in disturbed["kills"]) == ["agent", "rank", "server"]
    assert all(kill["generations"] > 0 for kill in disturbed["kills"])
    assert result["loss_gap"] < 0.02
    assert disturbed["processes_left"] == 0 and not disturbed["shared_memory_left"]
