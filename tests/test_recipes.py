"""The recipes as people start them, on pictures that every machine has."""

import json
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import pytest
from sklearn.datasets import load_digits

from .data.test_images import NAMES, write
from .pool import ROOT, environment, mpiexec

RUN = [sys.executable, "-m", "gluon_esgd.launch"]
IMAGENET = [sys.executable, str(ROOT / "recipes" / "resnet50_imagenet.py")]
MNIST = [sys.executable, str(ROOT / "recipes" / "mnist_elastic.py")]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """scikit-learn's digits as IDX files: the machine may have other pictures, and more."""
    folder = tmp_path_factory.mktemp("digits")
    found = load_digits()
    images = (found.images * 15).astype("u1")
    for kind, part in ((0, slice(None, -360)), (2, slice(-360, None))):
        write(folder, NAMES[kind], images[part])
        write(folder, NAMES[kind + 1], found.target[part].astype("u1"))
    return folder


def run(argv, timeout=110, **env):
    done = subprocess.run(
        list(map(str, argv)),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env=environment(**env),
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


@pytest.mark.servers
def test_main_job(digits, tmp_path):
    """2 clients of 2 ranks, 1 server: what `make train` does, and all that it promises."""
    job = ["-n", 4, "--clients", 2, "--servers", 1, "--rule", "esgd", "--job-dir", tmp_path / "j"]
    done = run([*RUN, *job, *IMAGENET, "--data", digits])
    out = done.stdout + done.stderr
    assert re.search(r"^data: .*1,437 pictures.*; network: three convolutions", out, re.M)
    assert len(re.findall(r"accuracy of client \d +9\d\.\d+%", out)) == 2
    assert out.count("accuracy of the center") == 1  # on one rank only
    assert "360/360" in out and "images_per_s=" in out
    assert "had other weights" not in out
    for promised in ("images/s in all", "into collectives", "to and from servers", "exchanges"):
        assert promised in out
    assert {p.name for p in (tmp_path / "j" / "tensorboard").iterdir()} == {"client0", "client1"}
    result = json.loads((tmp_path / "j" / "result.json").read_text())
    assert result["center"] >= 0.9
    assert all(c["exchanges"] >= 5 and c["server_bytes"] > 0 for c in result["clients"])
    assert mx.nd.load(str(tmp_path / "j" / "center.params"))
    assert not list((tmp_path / "j").glob("*.new"))


def test_alone_and_under_mpirun(digits, tmp_path):
    options = ["--data", digits, "--epochs", 3]
    alone = run([*IMAGENET, *options, "--output", tmp_path / "alone"])
    assert "accuracy of the center" in alone.stdout
    ranks = run(
        [*mpiexec(sys.executable), "-n", 2, *IMAGENET, *options, "--output", tmp_path / "2"]
    )
    assert ranks.stdout.count("accuracy of the center") == 1
    result = json.loads((tmp_path / "2" / "result.json").read_text())
    assert result["clients"][0]["collective_bytes"] > 0
    assert len(result["clients"]) == 1 and result["clients"][0]["server_bytes"] == 0


def test_mnist_alone():
    out = run(MNIST).stdout
    assert float(re.search(r": ([\d.]+)% of [\d]+ test pictures", out).group(1)) > 80


def test_imagenet_form(tmp_path):
    """RecordIO takes the same loop to ResNet-50 at 224 pixels: two steps of it."""
    from sklearn.datasets import load_sample_images

    jpegs = [
        Path(load_sample_images.__code__.co_filename).parent / "images" / name
        for name in ("china.jpg", "flower.jpg")
    ]
    for part in ("train", "val"):
        path = str(tmp_path / part)
        record = mx.recordio.MXIndexedRecordIO(path + ".idx", path + ".rec", "w")
        for i in range(4 if part == "train" else 3):
            header = mx.recordio.IRHeader(0, float(i % 2), i, 0)
            record.write_idx(i, mx.recordio.pack(header, jpegs[i % 2].read_bytes()))
        record.close()
    options = ["--data", tmp_path, "--batch-size", 2, "--epochs", 1, "--output", tmp_path / "o"]
    out = run([*IMAGENET, *options]).stdout
    assert "data: ImageNet (4 pictures" in out and "network: ResNet-50 v1 at 224 pixels" in out
    assert "of 3 pictures" in out
    (tmp_path / "val.idx").unlink()
    again = list(map(str, [*IMAGENET, *options]))
    failed = subprocess.run(again, capture_output=True, text=True)
    assert failed.returncode != 0 and "val.idx is missing" in failed.stderr


def test_a_wrong_folder_says_what_belongs_there(tmp_path):
    failed = subprocess.run(
        [*IMAGENET, "--data", str(tmp_path)], capture_output=True, text=True, env=environment()
    )
    assert failed.returncode != 0
    assert "has no train-images-idx3-ubyte" in failed.stderr


def test_recipes_stay_short():
    lines = {p.name: len(p.read_text().splitlines()) for p in (ROOT / "recipes").glob("*.py")}
    assert lines["mnist_elastic.py"] < 80 and lines["resnet50_imagenet.py"] <= 250
