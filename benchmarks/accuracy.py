"""Accuracy of the main job against plain ``gluon.Trainer`` with as many samples.

    python benchmarks/accuracy.py --output benchmarks/results/accuracy.json

runs `recipes/resnet50_imagenet.py` on the same pictures one after the other: 2 clients of 2
ranks with 1 server under ``esgd``, and one process, where `ElasticTrainer` is ``gluon.Trainer``
to the bit, with the same total batch and with that of one rank. Some ten minutes on two cores
with Fashion-MNIST; `--set digits` takes scikit-learn's digits and one minute.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
from common import describe, write

from gluon_esgd.data import load_images

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "resnet50_imagenet.py"
LAUNCHER = [sys.executable, "-m", "gluon_esgd.launch"]
JOB = [*LAUNCHER, "-n", "4", "--clients", "2", "--servers", "1", "--rule", "esgd"]
RUNS = [
    ("esgd, 2 clients of 2 ranks, batch 4 x 64", JOB, []),
    ("gluon.Trainer, one process, batch 256", [], ["--batch-size", "256"]),
    ("gluon.Trainer, one process, batch 64", [], []),
]


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--set", choices=["found", "digits"], default="found")
    parser.add_argument("--epochs", type=int, help="of the recipe unless given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    return parser.parse_args()


_Raw = argparse.RawDescriptionHelpFormatter


def write_digits(folder: Path) -> None:
    """Write scikit-learn's digits as the IDX files that the recipe reads."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    images = (digits.images[order] * (255 / 16)).round().astype(np.uint8)
    labels = digits.target[order].astype(np.uint8)
    for name, part in (("train", slice(None, -360)), ("t10k", slice(-360, None))):
        for kind, array in (("images-idx3", images[part]), ("labels-idx1", labels[part])):
            head = np.array([0x0800 + array.ndim, *array.shape], ">i4").tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + array.tobytes())


def run(launcher: List[str], options: List[str], folder: str) -> Dict[str, Any]:
    """Run the recipe once and return its result."""
    job = [*launcher, "--job-dir", f"{folder}/job"] if launcher else []
    command = [*job, sys.executable, str(RECIPE), *options, "--output", folder]
    env = {**os.environ, "OMP_NUM_THREADS": "1"} if launcher else None
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return json.loads(Path(folder, "result.json").read_text())


def main() -> None:
    """Run all, print the table, write the file."""
    args = arguments()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        common = ["--epochs", str(args.epochs)] if args.epochs else []
        if args.set == "digits":
            write_digits(Path(scratch))
            common += ["--data", scratch]
        for name, launcher, options in RUNS:
            for seed in args.seeds:
                chosen = [*options, *common, "--seed", str(seed)]
                with tempfile.TemporaryDirectory() as folder:
                    rows.append({"run": name, "seed": seed, **run(launcher, chosen, folder)})
    for name, *_ in RUNS:
        mine = [r for r in rows if r["run"] == name]
        accuracy = float(np.median([r["center/top_1"] for r in mine]))
        seconds = float(np.median([r["clients"][0]["seconds"] for r in mine]))
        print(f"{name:<44}{accuracy:8.2%}{seconds:8.0f} s of training")
    if args.output:
        pictures = "digits" if args.set == "digits" else load_images().name
        write(args.output, {**describe(), "pictures": pictures, "rows": rows})


if __name__ == "__main__":
    main()
