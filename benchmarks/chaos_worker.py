"""A rank of the job that `chaos.py` disturbs: softmax regression, which is a convex problem.

    chaos_worker.py EPOCHS BALLAST FOLDER

Trains EPOCHS epochs at least, and until FOLDER/enough is there. BALLAST floats without a gradient
make the center larger. The leader of client K writes what it did into FOLDER/clientK.trace.
"""

import json
import sys
import time
from pathlib import Path
from typing import IO, Any, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluon_esgd import ElasticTrainer, broadcast_object, world
from gluon_esgd.checkpoint import TrainingState

SAMPLES, FEATURES, CLASSES, BATCH, STEPS = 600, 10, 4, 100, 40
PACE_S = 0.01  # between steps, so that a run on few cores is not all computing
SLOW_S, WARM_UP = 0.2, 10  # steps: the first ones wait for all clients, or for the center


def problem() -> Tuple[mx.nd.NDArray, mx.nd.NDArray]:
    """Return data and labels that no linear function tells apart."""
    chance = np.random.RandomState(5)
    x = chance.randn(SAMPLES, FEATURES).astype(np.float32)
    y = (x @ chance.randn(FEATURES, CLASSES) + chance.randn(SAMPLES, CLASSES)).argmax(1)
    return mx.nd.array(x), mx.nd.array(y)


class Trace:
    """What the leader writes down: each exchange, and each step that was slow."""

    def __init__(self, path: Path) -> None:
        self._file: Optional[IO[str]] = open(path, "a") if world().is_leader else None  # noqa: SIM115
        self._exchanges, self._lost, self._slowest, self._steps = 0, 0, 0.0, 0

    def step(self, trainer: ElasticTrainer, seconds: float) -> None:
        """Note a step that took so long."""
        self._steps += 1
        seconds = seconds if self._steps > WARM_UP else 0.0
        self._slowest = max(self._slowest, seconds)
        exchanges, lost = trainer.counters.exchanges, trainer.counters.exchanges_lost
        if self._file is None or (exchanges == self._exchanges and seconds < SLOW_S):
            return
        line = {"time": time.time(), "lost": lost - self._lost, "slowest_s": self._slowest}
        self._file.write(json.dumps({**line, "exchanged": exchanges > self._exchanges}) + "\n")
        self._file.flush()
        self._exchanges, self._lost, self._slowest = exchanges, lost, 0.0


class Regression(gluon.nn.HybridBlock):
    """A linear layer, and weights that only travel."""

    def __init__(self, ballast: int) -> None:
        super().__init__()
        with self.name_scope():
            self.out = gluon.nn.Dense(CLASSES, in_units=FEATURES)
            if ballast:
                self.ballast = self.params.get("ballast", shape=(ballast,), init="zeros")

    def hybrid_forward(self, F: Any, x: Any, ballast: Any = None) -> Any:
        """Return the scores; the ballast counts nothing, but has a gradient."""
        out = self.out(x)
        return out if ballast is None else out + 0 * F.slice_axis(ballast, axis=0, begin=0, end=1)


def main() -> None:
    """Train, then write the loss of the center over all samples."""
    epochs, ballast, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    x, y = problem()
    net, loss_of = Regression(ballast), gluon.loss.SoftmaxCrossEntropyLoss()
    net.initialize(mx.init.Zero())
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.3, "wd": 1e-3})
    state, me = TrainingState(net, trainer, keep=2), world()
    trace = Trace(folder / f"client{me.client}.trace")
    chance, step = np.random.RandomState(me.worker_rank), 0
    for epoch in state.epochs(1_000_000):
        for _ in range(STEPS):
            rows = mx.nd.array(chance.randint(0, SAMPLES, BATCH))
            start = time.monotonic()
            with autograd.record():
                loss = loss_of(net(x.take(rows)), y.take(rows))
            loss.backward()
            trainer.step(BATCH)
            loss.wait_to_read()
            trace.step(trainer, time.monotonic() - start)
            time.sleep(PACE_S)
            step += 1
        if broadcast_object(epoch + 1 >= epochs and (folder / "enough").exists()):
            break
    trainer.finish()
    with trainer.center():
        found = float(loss_of(net(x), y).mean().asscalar())
    if me.is_leader:
        end = {"loss": found, "step": step}
        (folder / f"client{me.client}.end").write_text(json.dumps(end) + "\n")


if __name__ == "__main__":
    main()
