"""The benchmark of a training step, as small as it goes."""

import json
import subprocess
import sys

import pytest

from .pool import ROOT, environment

STEP = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--model", "mlp", "--image-size", "8"]


def run(*options):
    argv = [*STEP, *map(str, options)]
    return subprocess.run(
        argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=110
    )


@pytest.mark.mpi
def test_what_it_says_and_writes(tmp_path):
    output = tmp_path / "step.json"
    small = ["--ranks", "1,2", "--steps", 2, "--rounds", 1, "--push-model", "mlp"]
    done = run(*small, "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert result["command"].startswith("python benchmarks/step.py --model mlp")
    contestants = ["gluon-1", "ours-1", "gluon-2", "ours-2"]  # and Horovod where it is installed
    assert [key for key in result["images_per_s"] if "horovod" not in key] == contestants
    assert all(row["median"] > 0 for row in result["images_per_s"].values())
    ratio = result["ratios"]["ours-2 / gluon-2"]
    speeds = [result["images_per_s"][key]["median"] for key in ("ours-2", "gluon-2")]
    assert ratio["target"] == 0.97 and ratio["median"] == pytest.approx(speeds[0] / speeds[1])
    # Forced through buckets and engine: one rank alone would make no collective.
    assert result["collectives"]["ours-1"]["seconds_per_step"]["median"] > 0
    hidden = result["collectives"]["ours-2"]
    extra, inside = hidden["extra_step_s"]["median"], hidden["seconds_per_step"]["median"]
    assert hidden["hidden"]["median"] == pytest.approx(1 - extra / inside)
    # 192 x 64, seven times 64 x 64, 64 x 10, and biases, in float32
    elements = 192 * 64 + 7 * 64 * 64 + 64 * 10 + 8 * 64 + 10
    assert result["memory"]["gradient_bytes"] == 4 * elements
    assert result["memory"]["ranks"]["gluon-1"]["beyond_gluon"] == 0
    assert result["pushing"]["parameters"] == 2 * 9 and result["pushing"]["target_s"] == 1e-3
    for said in ("ours-2 / gluon-2", "scaling efficiency", "memory per rank", "pushing"):
        assert said in done.stdout


@pytest.mark.mpi
def test_trace_alone(tmp_path):
    path = tmp_path / "trace.json"
    done = run("--rounds", 0, "--steps", 2, "--trace", path, "--bucket-bytes", 20_000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lay inside it (medians of 5 steps" in done.stdout
    assert done.stdout.count("of backward, took") > 2  # 49 kB of a first layer, 17 kB of others
    assert json.loads(path.read_text())["traceEvents"]


def test_the_other_vendor():
    here = subprocess.run(
        [str(sys.executable), "-c", "import mpi4py.MPI as m; print(m.Get_library_version())"],
        capture_output=True,
        text=True,
        env=environment(),
    ).stdout
    other = "mpich" if "Open MPI" in here else "openmpi"
    done = run("--mpi", other)
    assert done.returncode != 0 and f"--mpi {other}: " in done.stderr
