"""The recipe for ImageNet as people start it, on pictures that every machine has."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Dict, List

import mxnet as mx
import pytest
import tensorboardX  # noqa: F401 (sets environment variables when imported: not in a test)
from mxnet import gluon

from gluon_esgd import vision
from gluon_esgd.telemetry import read_curves

from .data.pictures import write_pictures
from .pool import ROOT, environment, mpiexec, until
from .test_recipes import run

JOB = [sys.executable, "-m", "gluon_esgd.launch", "-n", "4", "--clients", "2", "--servers", "1"]
RECIPE = [sys.executable, str(ROOT / "recipes" / "resnet50_imagenet.py")]
SMALL = ["--model", "small", "--image-size", "16", "--batch-size", "4"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty pictures of ten classes in RecordIO, eleven to validate with."""
    folder = tmp_path_factory.mktemp("records")
    for name, count in (("train", 40), ("val", 11)):
        write_pictures(folder / f"{name}.rec", count, label=lambda i: i % 10)
    (folder / "classes.txt").write_text("".join(f"class {k}\n" for k in range(10)))
    return folder


def epochs(output: Path, client: int = 0) -> List[Dict[str, Any]]:
    lines = (output / "tensorboard" / f"client{client}" / "epochs.jsonl").read_text()
    return [json.loads(line) for line in lines.splitlines()]


@pytest.mark.servers
def test_main_job(digits: Path, tmp_path: Path) -> None:
    """2 clients of 2 ranks, 1 server: what `make train` does, and all that it promises."""
    folder = tmp_path / "j"
    job = [*JOB, "--rule", "esgd", "--job-dir", folder]
    done = run([*job, *RECIPE, "--data", digits])
    out = done.stdout + done.stderr
    assert re.search(r"^data: .*1,437 pictures.*; network: small for 10 classes", out, re.M)
    assert "batch: 64 x 1 x 2 rank(s) = 128 an update, 2 client(s), 6 batches an epoch" in out
    assert "learning rate: 0.2 x 128/256 = 0.1" in out
    assert len(re.findall(r"top-1 of client \d +9\d\.\d+%, top-5 (?:9\d|100)\.\d+%", out)) == 2
    assert out.count("top-1 of the center") == 1  # on one rank only
    assert "360/360" in out and "images_per_s=" in out
    assert "had other weights" not in out
    for promised in ("images/s in all", "into collectives", "to and from servers", "exchanges"):
        assert promised in out
    assert {p.name for p in (folder / "tensorboard").iterdir()} == {"client0", "client1"}
    shown = (ROOT / "README.md").read_text().split("top-1 of the center", 1)[1].split("```")[0]
    for line in shown.splitlines()[1:]:
        assert line[:26] in out, "README.md shows what is printed"
    result = json.loads((folder / "result.json").read_text())
    assert result["center/top_1"] >= 0.9
    assert all(c["exchanges"] >= 5 and c["server_bytes"] > 0 for c in result["clients"])
    assert all(c["samples"] == 2 * 60 * 360 for c in result["clients"])
    assert [line["epoch"] for line in epochs(folder, 1)] == list(range(60))
    best = max(line["center/top_1"] for line in epochs(folder))
    assert json.loads((folder / "best.json").read_text()) == {"value": best}
    assert mx.nd.load(str(folder / "center-0000.params"))
    assert not list(folder.glob("*.new*"))


def test_alone_and_under_mpirun(digits: Path, tmp_path: Path) -> None:
    options = ["--data", digits, "--epochs", 3]
    alone = run([*RECIPE, *options, "--output", tmp_path / "alone"])
    assert "top-1 of the center" in alone.stdout
    two = [*mpiexec(sys.executable), "-n", 2]
    ranks = run([*two, *RECIPE, *options, "--output", tmp_path / "2"])
    assert ranks.stdout.count("top-1 of the center") == 1
    result = json.loads((tmp_path / "2" / "result.json").read_text())
    assert result["clients"][0]["collective_bytes"] > 0
    assert len(result["clients"]) == 1 and result["clients"][0]["server_bytes"] == 0


def test_all_options_on_records(records: Path, tmp_path: Path) -> None:
    """RecordIO through the augmentation, an update of three batches, soft labels, another zoo."""
    options = ["--data", records, "--model", "resnet18_v1", "--image-size", 32, "--batch-size", 4]
    options += ["--epochs", 2, "--accumulate", 3, "--label-smoothing", 0.1, "--mixup", 0.2]
    options += ["--schedule", "step", "--warmup-epochs", 0.5, "--output", tmp_path / "o"]
    two = [*mpiexec(sys.executable), "-n", 2]
    out = run([*two, *RECIPE, *options]).stdout
    assert "40 pictures" in out and "network: resnet18_v1 for 10 classes" in out
    assert "batch: 4 x 3 x 2 rank(s) = 24 an update, 1 client(s), 5 batches an epoch" in out
    assert re.search(r"top-1 of the center +\d+\.\d+%, top-5 \d+\.\d+% of 11\n", out)
    (client,) = json.loads((tmp_path / "o" / "result.json").read_text())["clients"]
    assert client["steps"] == 2 * 2 and client["samples"] == 2 * 2 * 5 * 4
    exported = str(tmp_path / "o" / "center")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an exported graph says no types
        net = gluon.SymbolBlock.imports(
            f"{exported}-symbol.json", ["data"], f"{exported}-0000.params"
        )
    assert net(vision.prepare(str(jpegs()[0]), 32)).shape == (1, 10)


def jpegs() -> List[Path]:
    from sklearn.datasets import load_sample_images

    folder = Path(load_sample_images.__code__.co_filename).parent / "images"
    return [folder / "china.jpg", folder / "flower.jpg"]


def test_class_folders(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("val", 1)):
        for path in jpegs():
            folder = tmp_path / part / path.stem
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}.jpg").symlink_to(path)
    options = [*SMALL, "--data", tmp_path, "--epochs", 3, "--output", tmp_path / "o"]
    out = run([*RECIPE, *options, "--threads", 2]).stdout
    assert "8 pictures" in out and "network: small for 2 classes" in out and "of 2\n" in out
    assert [line["epoch"] for line in epochs(tmp_path / "o")] == [0, 1, 2]


def test_noise_and_more_epochs_later(tmp_path: Path) -> None:
    """An epoch in one process, two more on two ranks, half as many updates in each; then none."""
    options = [*SMALL, "--synthetic", 80, "--output", tmp_path]
    alone = run([*RECIPE, *options, "--epochs", 1])
    assert "20 batches an epoch" in alone.stdout and "s for 1 epochs" in alone.stdout
    two = [*mpiexec(sys.executable), "-n", 2]
    more = run([*two, *RECIPE, *options, "--epochs", 3])
    assert "10 batches an epoch" in more.stdout and "s for 2 epochs" in more.stdout
    assert more.stdout.count(f"goes on from epoch 1, batch 0 ({tmp_path}/checkpoints/client0)") == 1
    assert re.search(
        r"^not as in the run before: epochs 1, now 3; lr [\d.]+, now", more.stdout, re.M
    )
    rates = dict(read_curves(tmp_path / "tensorboard" / "client0")["learning_rate"])
    assert list(rates) == [10, 20, 30], "from step 10 on it was drawn anew"
    lr = 0.1 * 8 / 256
    assert rates[20] == pytest.approx(lr * 0.27, rel=0.1), "that of three epochs"
    assert rates[30] < 0.01 * lr
    result = (tmp_path / "result.json").read_bytes()
    none = run([*two, *RECIPE, *options, "--epochs", 3, "--lr", 7]).stdout
    assert none.count("nothing left: all 3 epochs were done in") == 1
    assert f"lr {0.1 * 8 / 256}, now {7 * 8 / 256}" in none and "images/s" not in none
    assert (tmp_path / "result.json").read_bytes() == result


def test_a_killed_run_goes_on_inside_its_epoch(records: Path, tmp_path: Path) -> None:
    """SIGKILL in the second epoch; the same command ends where an undisturbed one does."""
    options = [*SMALL, "--data", records, "--epochs", 3, "--checkpoint-s", 0.001]
    argv = [*RECIPE, *options, "--output", tmp_path / "killed"]
    process = subprocess.Popen(
        list(map(str, argv)), env=environment(), cwd=ROOT, stderr=subprocess.PIPE
    )
    saved = tmp_path / "killed" / "checkpoints" / "client0"
    until(
        lambda: any("epoch1-batch" in p.name and "batch0" not in p.name for p in found(saved)), 60
    )
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    at = max(found(saved))
    again = run(argv)
    assert f"{at.name}: epoch" in again.stderr or "30/30" in again.stderr
    run([*RECIPE, *options, "--output", tmp_path / "whole"])
    steps = [line["step"] for line in epochs(tmp_path / "killed")]
    assert steps == [10, 20, 30]
    weights = [
        mx.nd.load(str(tmp_path / name / "center-0000.params")) for name in ("killed", "whole")
    ]
    for name, weight in weights[1].items():  # a last bit differs between undisturbed runs, too
        assert weights[0][name].asnumpy() == pytest.approx(weight.asnumpy(), abs=1e-5)


def found(folder: Path) -> List[Path]:
    return list(folder.glob("checkpoint-*.npz"))


def test_what_is_wrong_is_said_before_training(records: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in records.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    data = bytearray((records / "train.rec").read_bytes())
    offset = int((records / "train.idx").read_text().splitlines()[7].split()[1])
    data[offset] ^= 1
    (broken / "train.rec").write_bytes(data)
    fails(["--data", broken], rf"train\.rec: record 7 at byte {offset}")
    (broken / "train.rec").write_bytes((records / "train.rec").read_bytes())
    (broken / "val.idx").unlink()
    fails(["--data", broken], r"val\.idx: there is no index")
    (broken / "val.rec").unlink()
    fails(["--data", broken], r"val\.rec is missing: gluon-esgd data makes it")
    fails(["--data", tmp_path], "has folders, but not both train/ and val/: gluon-esgd data")
    fails(["--data", broken / "nothing"], "nothing': no such folder")
    fails(["--accumulate", 0], "--accumulate must be 1 or more")
    fails(["--dtype", "float16"], "--dtype float16 needs a GPU")
    (tmp_path / "checkpoints" / "client0").mkdir(parents=True)
    fails(["--resume", "none", "--output", tmp_path], "client0 is of an earlier run: give another")


def fails(options: List[Any], message: str) -> None:
    argv = list(map(str, [*RECIPE, *SMALL, *options]))
    failed = subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=60)
    assert failed.returncode != 0
    assert re.search(message, failed.stderr), failed.stderr
