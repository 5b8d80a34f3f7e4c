"""The recipes as people start them, on pictures that every machine has."""

import importlib.util
import pydoc_data.topics
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest

from .data.pictures import png
from .pool import ROOT, environment, mpiexec

RUN = [sys.executable, "-m", "gluon_esgd.launch"]
CIFAR10 = [sys.executable, str(ROOT / "recipes" / "cifar10_resnet.py")]
LANGUAGE = [sys.executable, str(ROOT / "recipes" / "language_model.py")]
FINETUNE = [sys.executable, str(ROOT / "recipes" / "finetune.py")]
MNIST = [sys.executable, str(ROOT / "recipes" / "mnist_elastic.py")]


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


def test_mnist_alone():
    out = run(MNIST).stdout
    assert float(re.search(r": ([\d.]+)% of [\d]+ test pictures", out).group(1)) > 80


def told(pattern, out):
    """All numbers that `pattern` finds in the lines of `out`."""
    return [float(found) for found in re.findall(pattern, out, re.M)]


def test_cifar10_goes_on_where_it_was(digits, tmp_path):
    """SIGTERM ends one process, two ranks go on from its checkpoint: the epochs that are left."""
    options = [*CIFAR10, "--data", digits, "--folder", tmp_path, "--epochs", 3]
    argv = list(map(str, options))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment()) as alone:
        first = alone.stdout.readline()
        alone.terminate()
        rest = alone.communicate(timeout=60)[0]
    assert re.match(r"digits\d*, epoch 1: ", first) and "at the end" not in rest
    assert alone.returncode == 143
    done = 1 + rest.count("epoch")
    more = run([*mpiexec(sys.executable), "-n", 2, *options]).stdout
    left = [f"epoch {epoch}" for epoch in range(done + 1, 4)]
    assert re.findall(r"^digits\d*, (.*):", more, re.M) == [*left, "at the end"]
    assert told(r"at the end: .* ([\d.]+)%", more)[0] > 50


def module(command):
    """The recipe that `command` runs, as a module."""
    spec = importlib.util.spec_from_file_location(Path(command[1]).stem, command[1])
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


def test_cifar10_of_gluon_is_read_and_never_fetched(tmp_path, monkeypatch):
    recipe = module(CIFAR10)
    records = np.arange(3073 * 4, dtype="u1").reshape(4, 3073)
    for name in [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]:
        (tmp_path / name).write_bytes(records.tobytes())
    with pytest.raises(FileNotFoundError, match=r"data_batch_1\.bin is missing or is not"):
        recipe.pictures(str(tmp_path))
    monkeypatch.setattr(mx.gluon.utils, "check_sha1", lambda *_: True)
    monkeypatch.setattr(mx.gluon.data.vision.datasets, "check_sha1", lambda *_: True)
    name, train, test = recipe.pictures(str(tmp_path))
    assert (name, len(train), len(test)) == ("CIFAR-10", 20, 4)
    picture, label = test[1]
    assert label == records[1, 0]
    expected = records[1, 1:].reshape(3, 32, 32).transpose(1, 2, 0)
    assert (picture.asnumpy() == expected).all()
    assert {recipe.random_crop(picture).shape for _ in range(9)} == {(32, 32, 3)}
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3\.bin"):
        recipe.pictures(str(tmp_path))


def two_clients(ranks, folder):
    """The start of a command that runs `ranks` of two clients with a server."""
    job = ["-n", ranks, "--clients", 2, "--servers", 1, "--rule", "esgd", "--interval", 4]
    return [*RUN, *job, "--job-dir", folder / "job"]


@pytest.mark.servers
@pytest.mark.parametrize(("clients", "epochs", "most"), [(1, 1, 12), (2, 2, 25)])
def test_language_model(tmp_path, clients, epochs, most):
    """Alone, and 2 clients of 2 ranks with a server: perplexity falls far from where it starts."""
    text = "".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
    (tmp_path / "text").write_text(text[:120_000])
    start = two_clients(4, tmp_path) if clients == 2 else []
    out = run([*start, *LANGUAGE, "--text", tmp_path / "text", "--epochs", epochs]).stdout
    (before,) = told(r"^before training: perplexity ([\d.]+)$", out)
    (end,) = told(r"^at the end, center: perplexity ([\d.]+)$", out)
    assert 60 < before < 120 and end < most
    own = told(r"^at the end, client \d: perplexity ([\d.]+)$", out)
    assert len(own) == clients and max(own) < 2 * most


@pytest.mark.servers
@pytest.mark.parametrize("clients", [1, 2])
def test_finetune(digits, tmp_path, clients):
    """A frozen body is worth something if it has learned: alone, and in 2 clients."""
    start = two_clients(2, tmp_path) if clients == 2 else []
    out = run([*start, *FINETUNE, "--data", digits]).stdout
    heads = dict(re.findall(r"^(\S+) body: ([\d.]+)% with a new head", out, re.M))
    assert float(heads["pre-trained"]) > float(heads["random"]) + 5
    assert min(told(r"([\d.]+)% with its last stage", out)) > 60


@pytest.mark.servers
def test_finetune_parameters_of_the_model_zoo(tmp_path):
    """What is frozen in two clients that exchange is in the end what the file had, to the bit."""
    from sklearn.datasets import load_sample_images

    images = Path(load_sample_images.__code__.co_filename).parent / "images"
    for part in ("train", "val"):
        for name in ("china", "flower"):
            (tmp_path / part / name).mkdir(parents=True)
            for copy in "ab":
                jpeg = (images / f"{name}.jpg").read_bytes()
                (tmp_path / part / name / f"{copy}.jpg").write_bytes(jpeg)
    net = mx.gluon.model_zoo.vision.get_model("mobilenet0.25", classes=7)
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 3, 224, 224)))
    net.save_parameters(str(tmp_path / "zoo.params"))
    params = ["--params", tmp_path / "zoo.params", "--model", "mobilenet0.25"]
    options = [*params, "--data", tmp_path, "--output", tmp_path / "out"]
    out = run([*two_clients(2, tmp_path), *FINETUNE, *options]).stdout
    assert len(told(r"^pre-trained body: ([\d.]+)%", out)) == 1 and "random" not in out
    before = mx.nd.load(str(tmp_path / "zoo.params"))
    after = mx.nd.load(str(tmp_path / "out"))
    assert after["output.bias"].shape == (2,) and set(after) == set(before)
    for name in (name for name in before if name.startswith("features")):
        assert (after[name].asnumpy() == before[name].asnumpy()).all(), name


def test_finetune_labels_are_the_classes_to_train_on(tmp_path, monkeypatch, capsys):
    """Also where val/ lacks the first of them."""
    recipe, given = module(FINETUNE), []
    for part, names in (("train", "abc"), ("val", "bc")):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "1.png").write_bytes(png(np.zeros((8, 8, 3), "u1")))
    mx.nd.save(str(tmp_path / "zoo.params"), {"output.bias": mx.nd.zeros(7)})
    net = SimpleNamespace(load_parameters=lambda path, ctx: None)
    monkeypatch.setattr(recipe, "get_model", lambda name, classes: given.append(classes) or net)
    monkeypatch.setattr(recipe, "train", lambda net, data, *_: given.append(data) or 0.5)
    options = ["--params", tmp_path / "zoo.params", "--data", tmp_path]
    monkeypatch.setattr(sys, "argv", list(map(str, ["finetune.py", *options])))
    recipe.main()
    classes, data, _ = given
    assert (classes, data.num_classes) == (
        7,
        3,
    ) and "50.00% with a new head" in capsys.readouterr().out
    labels = [list(y.asnumpy()) for _, y in (*data.validation(), *data.train)]
    assert (labels[0], sorted(labels[1])) == ([1, 2], [0, 1, 2])


def test_recipes_stay_short():
    lines = {p.name: len(p.read_text().splitlines()) for p in (ROOT / "recipes").glob("*.py")}
    assert lines.pop("mnist_elastic.py") < 80 and lines.pop("resnet50_imagenet.py") <= 250
    assert all(count < 120 for count in lines.values()), lines
