"""One worker of `convergence.py`: trains the same network again and again, each time otherwise.

    convergence_worker.py TASK

TASK is JSON (see `convergence.py`); its "trials" are done one after the other in the same job, so
that its start is paid once. In each the first step, which waits for all clients, is not timed.
Client 0 keeps the center's weights some twenty times meanwhile, and tries them when training is
over. Its rank 0 appends what it found to FOLDER/trials.jsonl, the leader of client K when it
exchanged to FOLDER/exchangesK.jsonl.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluon_esgd import ElasticTrainer, broadcast_object, world
from gluon_esgd.data import load_images

CHECK_STEPS = 5  # between looks at the clock, which all ranks of a client make together
KEPT = 20  # snapshots of the center in a trial
EVALUATION_BATCH = 1_000
ELASTIC = ("interval", "alpha", "lazy", "outer")

Weights = List[np.ndarray]


class Pictures:
    """Pictures as the network takes them: this worker's own for training, all for evaluation."""

    def __init__(self, train: int, validation: int, test: int) -> None:
        images, me = load_images(), world()
        order = np.random.RandomState(7).permutation(len(images.train_labels))
        held, mine = order[:validation], order[validation : validation + train]
        mine = mine[me.worker_rank :: me.num_workers]
        self.train = _arrays(images.train_images[mine], images.train_labels[mine])
        self.validation = _arrays(images.train_images[held], images.train_labels[held])
        self.test = _arrays(images.test_images[:test], images.test_labels[:test])

    def batches(self, size: int, seed: int) -> Any:
        """Yield batches for ever, each epoch in another order."""
        chance, (data, label) = np.random.RandomState([seed, world().worker_rank]), self.train
        while True:
            order = mx.nd.array(chance.permutation(len(label)), dtype="int32")
            for start in range(0, len(label) - size + 1, size):
                rows = order[start : start + size]
                yield data.take(rows), label.take(rows)


def _arrays(images: np.ndarray, labels: np.ndarray) -> Tuple[mx.nd.NDArray, mx.nd.NDArray]:
    scaled = (images[:, None].astype(np.float32) / 255 - 0.2860) / 0.3530
    return mx.nd.array(scaled), mx.nd.array(labels)


def network() -> gluon.HybridBlock:
    """Return two convolutions and two dense layers: 207,018 parameters at 28 pixels."""
    nn, net = gluon.nn, gluon.nn.HybridSequential()
    for channels in (16, 32):
        net.add(nn.Conv2D(channels, 3, strides=2, padding=1, activation="relu"))
    net.add(nn.Dense(128, activation="relu"), nn.Dense(10))
    net.initialize(mx.init.Xavier(magnitude=2))
    net.hybridize(static_alloc=True, static_shape=True)
    return net


class Trial:
    """Training once."""

    def __init__(self, task: Dict[str, Any], trial: Dict[str, Any], pictures: Pictures) -> None:
        self._task, self._trial, self._pictures = task, trial, pictures
        mx.random.seed(trial["seed"])
        self._net, self._loss = network(), gluon.loss.SoftmaxCrossEntropyLoss()
        self._net(pictures.test[0][:2])  # shapes
        options = {"learning_rate": trial["lr"], "momentum": 0.9, "wd": 1e-4}
        elastic = {name: trial[name] for name in ELASTIC if name in trial}
        self._trainer = ElasticTrainer(self._net.collect_params(), "sgd", options, **elastic)
        self._batches = pictures.batches(task["batch"], trial["seed"])
        self._steps, self._exchanges = 0, 0
        self._seen: List[Tuple[float, float]] = []
        self._kept: List[Tuple[float, int, Weights]] = []

    def run(self) -> Dict[str, Any]:
        """Train until time or samples are used up; return what the center knew when."""
        self._step()
        mx.nd.waitall()
        self._start, cpu_s = time.perf_counter(), time.process_time()
        while True:
            for _ in range(CHECK_STEPS):
                self._step()
            mx.nd.waitall()
            done, keep = broadcast_object(self._look())
            if keep:
                self._keep()
            if done:
                break
        found = {
            "seconds": time.perf_counter() - self._start,
            "cpu_s": time.process_time() - cpu_s,  # of this process, all its threads
            "steps": self._steps,
        }
        if self._task["rule"] == "sgd" and world().num_clients > 1:
            self._trainer.join()  # clients come to their end by their own clocks
        self._trainer.finish()
        return {**self._trial, **found, "center": self._evaluate()}

    def exchanges(self) -> List[Tuple[float, float]]:
        """Return when, by the clock of all processes, and how stale each exchange was."""
        return self._seen

    def _step(self) -> None:
        data, label = next(self._batches)
        with autograd.record():
            loss = self._loss(self._net(data), label)
        loss.backward()
        self._trainer.step(len(data))
        self._steps += 1
        counters = self._trainer.counters
        if counters.exchanges > self._exchanges:
            self._exchanges = counters.exchanges
            self._seen.append((time.time(), counters.staleness))

    def _look(self) -> Tuple[bool, bool]:
        """Whether the trial is over, and whether the center is to be kept; leaders decide."""
        seconds = time.perf_counter() - self._start
        samples = self._steps * self._task["batch"] * world().num_workers
        if "samples" in self._trial:
            share = samples / self._trial["samples"]
        else:
            share = seconds / self._trial["seconds_limit"]
        due = share >= (len(self._kept) + 1) / KEPT or share >= 1
        return share >= 1, due and world().client == 0

    def _keep(self) -> None:
        """Under rule sgd weights are the same everywhere; else the center is pulled."""
        if self._task["rule"] == "sgd":
            weights = self._weights()
        else:
            with self._trainer.center():
                weights = self._weights()
        self._kept.append((time.perf_counter() - self._start, self._steps, weights))

    def _weights(self) -> Weights:
        return [p.data().asnumpy() for p in self._net.collect_params().values()]

    def _evaluate(self) -> List[Dict[str, float]]:
        found = []
        for seconds, steps, weights in self._kept if world().is_main else ():
            for param, array in zip(self._net.collect_params().values(), weights):
                param.set_data(mx.nd.array(array))
            samples = steps * self._task["batch"] * world().num_workers
            accuracy = self._accuracy(getattr(self._pictures, self._task["evaluate"]))
            found.append({"seconds": seconds, "samples": samples, "accuracy": accuracy})
        return found

    def _accuracy(self, pictures: Tuple[mx.nd.NDArray, mx.nd.NDArray]) -> float:
        data, label = pictures
        right = 0.0
        for start in range(0, len(label), EVALUATION_BATCH):
            rows = slice(start, start + EVALUATION_BATCH)
            right += (self._net(data[rows]).argmax(axis=1) == label[rows]).sum().asscalar()
        return right / len(label)


def main() -> None:
    """Do all trials."""
    task = json.loads(sys.argv[1])
    folder, me = Path(task["folder"]), world()
    pictures = Pictures(task["train"], task["validation"], task["test"])
    for number, chosen in enumerate(task["trials"]):
        trial = Trial(task, chosen, pictures)
        found = trial.run()
        if me.is_main:
            _append(folder / "trials.jsonl", found)
        if me.is_leader:
            line = {"trial": number, "exchanges": trial.exchanges()}
            _append(folder / f"exchanges{me.client}.jsonl", line)


def _append(path: Path, line: Dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
