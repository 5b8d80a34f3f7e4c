"""What the recipe costs beside a bare Gluon loop, and how fast its input is.

    python benchmarks/recipe.py --output benchmarks/results/recipe.json

times, in turn and in fresh processes, `recipes/resnet50_imagenet.py --synthetic` on one rank and a
loop of a dozen lines with ``gluon.Trainer``, the same network and the same noise, without their
first steps: the ratio is what progress bar, curves and accuracy of every batch cost. What a
checkpoint costs, once an epoch, is `checkpoint.py`'s to say. With `--data DIR` (RecordIO) it
also reads training batches without a network, in one to so many processes at the same time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

from common import ROOT, describe, write

from gluon_esgd.telemetry import read_curves

WARM_UP = 20  # steps that do not count
_Raw = argparse.RawDescriptionHelpFormatter


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--model", default="resnet18_v1")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200, help="of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, help="folder with train.rec and val.rec")
    parser.add_argument("--readers", type=int, default=2, help="processes that read, at most")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    parser.add_argument("--turn", choices=["bare", "read"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(
            f"--steps {args.steps} must be above {WARM_UP}: the first {WARM_UP} are left out"
        )
    return args


def bare(args: argparse.Namespace) -> Tuple[float, int]:
    """Train without anything around; return images/s and steps."""
    import mxnet as mx
    from mxnet import autograd, gluon

    from gluon_esgd import vision

    pictures = vision.open_pictures(
        batch_size=args.batch_size,
        image_size=args.image_size,
        synthetic=(args.steps * args.batch_size, 1000),
    )
    net = vision.get_network(args.model, pictures.num_classes)
    net.initialize(mx.init.Xavier(magnitude=2))
    net.hybridize(static_alloc=True, static_shape=True)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    options = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-4}
    trainer = gluon.Trainer(net.collect_params(), "nag", options)
    start, step = 0.0, 0
    for step, (data, label) in enumerate(pictures.train, 1):
        with autograd.record():
            loss = loss_fn(net(data), label)
        loss.backward()
        trainer.step(len(data))
        if step % 10 == 0:
            loss.wait_to_read()
        if step == WARM_UP:
            mx.nd.waitall()
            start = time.perf_counter()
    mx.nd.waitall()
    return (step - WARM_UP) * args.batch_size / (time.perf_counter() - start), step


def read(args: argparse.Namespace) -> float:
    """Read training batches without a network; return images/s."""
    from gluon_esgd import vision

    size = {"batch_size": args.batch_size, "image_size": args.image_size}
    return vision.input_rate(vision.open_pictures(str(args.data), **size), limit_s=5.0)


def turn(name: str) -> List[str]:
    """Return the command of a turn of this script, which prints JSON."""
    return [sys.executable, *sys.argv, "--turn", name]


def recipe(args: argparse.Namespace) -> Tuple[float, int]:
    """Run the recipe for an epoch; return images/s by its own curves, and steps."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--synthetic", args.steps * args.batch_size, "--epochs", 1, "--output", folder]
        for name in ("model", "image_size", "batch_size"):
            options += [f"--{name.replace('_', '-')}", getattr(args, name)]
        command = [sys.executable, ROOT / "recipes" / "resnet50_imagenet.py", *options]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        points = read_curves(Path(folder, "tensorboard", "client0"))["time/step_s"]
        (client,) = json.loads(Path(folder, "result.json").read_text())["clients"]
    mean_s = statistics.mean(value for step, value in points if step > WARM_UP)
    return args.batch_size / mean_s, client["steps"]


def side_by_side(count: int) -> float:
    """Return images/s of `count` readers together."""
    readers = [subprocess.Popen(turn("read"), stdout=subprocess.PIPE) for _ in range(count)]
    return sum(json.loads(reader.communicate()[0]) for reader in readers)


def main() -> None:
    """Measure in turn, show, and write."""
    args = arguments()
    if args.turn:
        print(json.dumps({"bare": bare, "read": read}[args.turn](args)))
        return
    results: Dict[str, Any] = {**describe(), "bare": [], "recipe": [], "steps": {}}
    for _ in range(args.rounds):
        said = {"bare": json.loads(subprocess.check_output(turn("bare"))), "recipe": recipe(args)}
        for name, (rate, steps) in said.items():
            results[name].append(rate)
            results["steps"][name] = steps
    pairs = zip(results["recipe"], results["bare"])
    results["ratio"] = statistics.median(ours / bare for ours, bare in pairs)
    for name in ("bare", "recipe"):
        print(f"{name:<8}{statistics.median(results[name]):>10,.0f} images/s")
    print(f"ratio   {results['ratio']:>10.3f} (median of {args.rounds} pairs)")
    if args.data:
        results["input"] = {}
        for count in range(1, args.readers + 1):
            rates = [side_by_side(count) for _ in range(3)]
            results["input"][count] = statistics.median(rates)
            print(f"input, {count} process(es): {results['input'][count]:,.0f} images/s")
    if args.output:
        write(args.output, results)


if __name__ == "__main__":
    main()
