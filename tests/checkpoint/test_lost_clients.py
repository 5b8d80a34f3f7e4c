"""Under rule sgd a process dies: all clients start again where they were, real and killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ..pool import ROOT, environment
from .loops import positions
from .lost import WHEN

pytestmark = [pytest.mark.servers, pytest.mark.timeout(120)]


def train(folder: Path, victim: str, *flags: str) -> List[Dict[str, Any]]:
    """Run a job of two clients of two ranks; return what each rank wrote at its end."""
    counts = ["-n", "4", "--clients", "2", "--servers", "1", "--rule", "sgd", *flags]
    launcher = [sys.executable, "-m", "gluon_esgd.launch", *counts, "--job-dir", str(folder)]
    script = [sys.executable, "-m", "tests.checkpoint.lost", str(folder), victim]
    done = subprocess.run(
        [*launcher, *script], cwd=ROOT, env=environment(GLUON_ESGD_BUCKET_BYTES="64"),
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "said").write_text(done.stderr)
    return [json.loads((folder / f"rank{k}.json").read_text()) for k in range(4)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> str:
    found = train(tmp_path_factory.mktemp("job"), "nobody")
    assert len({rank["weights"] for rank in found}) == 1
    return str(found[0]["weights"])


@pytest.mark.parametrize("victim", ["0", "1", "server", "rounds"])
def test_nothing_is_lost_but_the_step_that_failed(
    victim: str, undisturbed: str, tmp_path: Path
) -> None:
    found = train(tmp_path, victim, "--max-restarts", "1")
    assert [rank["weights"] for rank in found] == [undisturbed] * 4
    assert [rank["life"] for rank in found] == [1] * 4
    # Nobody saves in mid-epoch but for what was lost: it went on with the batch that failed.
    assert [tuple(rank["seen"][0]) for rank in found] == [WHEN] * 4
    well = [client for client in (0, 1) if str(client) != victim]
    saved = [WHEN in positions(str(tmp_path / "checkpoints"), client) for client in well]
    assert all(saved) if victim == "rounds" else any(saved)
    assert "no checkpoint is in" not in (tmp_path / "said").read_text()
