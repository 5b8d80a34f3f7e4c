"""The recipes as people start them, on pictures that every machine has."""

import re
import subprocess
import sys

from .pool import ROOT, environment

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


def test_recipes_stay_short():
    lines = {p.name: len(p.read_text().splitlines()) for p in (ROOT / "recipes").glob("*.py")}
    assert lines["mnist_elastic.py"] < 80 and lines["resnet50_imagenet.py"] <= 250
