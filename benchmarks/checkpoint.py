"""How long a training step waits for a checkpoint: in the background, at once, and by Gluon.

    python benchmarks/checkpoint.py --output benchmarks/results/checkpoint.json

trains one process on random pictures and saves after every few steps, in turn by `TrainingState`
with and without ``background=True`` and by ``net.save_parameters`` and ``trainer.save_states``,
which hold less (no position, no random states, no checksums). *wait* is the time that the call
takes when nothing is under way in MXNet's engine. *drag* is what the steps until the next save
take longer than as many without one: a background write needs a core, too.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import mxnet as mx
from common import describe, write
from mxnet import autograd, gluon

from gluon_esgd import ElasticTrainer
from gluon_esgd.checkpoint import TrainingState

_Raw = argparse.RawDescriptionHelpFormatter


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--model", default="resnet50_v1", help="of Gluon's zoo")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="from a save to the next one")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each way")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    return parser.parse_args()


class Training:
    """A network, a trainer with momentum, and one batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.net = gluon.model_zoo.vision.get_model(args.model)
        self.net.initialize(mx.init.Xavier())
        self.net.hybridize(static_alloc=True, static_shape=True)
        shape = (args.batch_size, 3, args.image_size, args.image_size)
        self._x, self._y = mx.nd.random.uniform(shape=shape), mx.nd.zeros(args.batch_size)
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self.net(self._x).wait_to_read()
        options = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-4}
        self.trainer = ElasticTrainer(self.net.collect_params(), "sgd", options)

    def step(self) -> float:
        """Make a step, to its end; return its seconds."""
        start = time.perf_counter()
        with autograd.record():
            loss = self._loss(self.net(self._x), self._y)
        loss.backward()
        self.trainer.step(len(self._y))
        mx.nd.waitall()
        return time.perf_counter() - start

    def mebibytes(self) -> float:
        """Return the size of the weights; the momenta are as large."""
        return sum(p.data().size for p in self.net.collect_params().values()) * 4 / 2**20


def ways(training: Training, folder: str) -> Dict[str, Callable[[], Any]]:
    """Return the ways to save, by name."""
    net, trainer = training.net, training.trainer
    behind = TrainingState(net, trainer, folder=f"{folder}/behind", keep=2, background=True)
    at_once = TrainingState(net, trainer, folder=f"{folder}/at_once", keep=2)

    def by_gluon() -> None:
        net.save_parameters(f"{folder}/net.params")
        trainer.save_states(f"{folder}/trainer.states")

    return {"background": behind.save, "at once": at_once.save, "Gluon's two files": by_gluon}


def measure(args: argparse.Namespace) -> Dict[str, Any]:
    """Save by all ways in turn; return medians in seconds."""
    training = Training(args)
    for _ in range(3):
        training.step()
    steps: List[float] = []
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        savers = ways(training, folder)
        waits: Dict[str, List[float]] = {name: [] for name in savers}
        after: Dict[str, List[float]] = {name: [] for name in savers}
        for _ in range(args.rounds):
            steps += [training.step() for _ in range(args.steps)]
            for name, save in savers.items():
                start = time.perf_counter()
                save()
                waits[name].append(time.perf_counter() - start)
                after[name].append(sum(training.step() for _ in range(args.steps)))
    step = statistics.median(steps)
    found: Dict[str, Any] = {"weights_mib": round(training.mebibytes(), 1), "step_s": step}
    for name in waits:
        wait, rest = statistics.median(waits[name]), statistics.median(after[name])
        drag = rest - args.steps * step
        found[name] = {"wait_s": wait, "wait_of_a_step": wait / step, "drag_s": drag}
    return found


def main() -> None:
    """Measure, print, write."""
    args = arguments()
    found = measure(args)
    print(f"weights {found['weights_mib']} MiB, a step {found['step_s']:.3f} s")
    for name in ("background", "at once", "Gluon's two files"):
        of = found[name]
        share, drag = of["wait_of_a_step"], of["drag_s"]
        print(f"{name:18} wait {of['wait_s']:.3f} s, {share:.1%} of a step; drag {drag:+.3f} s")
    if args.output is not None:
        write(args.output, {**describe(), **found})


if __name__ == "__main__":
    main()
