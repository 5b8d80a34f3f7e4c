"""The shortest complete script: pictures of clothes, a small network, elastic averaging.

    python recipes/mnist_elastic.py                                         # one process
    mpirun -n 2 python recipes/mnist_elastic.py                             # one client, pure MPI
    gluon-esgd run -n 4 --clients 2 python recipes/mnist_elastic.py         # two clients, a server

Fashion-MNIST where the machine has it, else scikit-learn's digits; under a minute.
"""

from typing import Optional

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from gluon_esgd import ElasticTrainer, world
from gluon_esgd.data import ShardSampler, load_images
from gluon_esgd.metrics import evaluate
from gluon_esgd.telemetry import TrainingLog

BATCH_SIZE = 64  # of each rank
EPOCHS = 5
LEARNING_RATE = 0.05


def loader(
    images: np.ndarray, labels: np.ndarray, sampler: Optional[gluon.data.Sampler] = None
) -> gluon.data.DataLoader:
    """Return batches of NDArrays: pictures as bytes, classes."""
    dataset = gluon.data.ArrayDataset(images[:, None], labels)
    return gluon.data.DataLoader(dataset, BATCH_SIZE, sampler=sampler)


class Network(nn.HybridSequential):
    """A multilayer perceptron on bytes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.add(nn.HybridLambda(lambda F, x: F.cast(x, "float32") / 255))
        self.add(nn.Dense(256, activation="relu"), nn.Dense(128, activation="relu"))
        self.add(nn.Dense(classes))


def main() -> None:
    """Train, then say how many of the test pictures the center knows."""
    mx.random.seed(0)
    images = load_images()
    net = Network(images.num_classes)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = ElasticTrainer(
        net.collect_params(), "sgd", {"learning_rate": LEARNING_RATE, "momentum": 0.9}
    )
    sampler = ShardSampler(len(images.train_labels))
    train = loader(images.train_images, images.train_labels, sampler)

    with TrainingLog(trainer, steps=EPOCHS * len(train)) as log:
        for _ in range(EPOCHS):
            for data, label in train:
                with autograd.record():
                    loss = loss_fn(net(data), label)
                loss.backward()
                trainer.step(len(data))
                log.update(loss, len(data))
    trainer.finish()

    me = world()
    mine = slice(me.rank, None, me.size)  # each test picture counts once
    test = loader(images.test_images[mine], images.test_labels[mine])
    with trainer.center():
        result = evaluate(net, test, mx.metric.Accuracy())
    if me.is_main:
        print(f"{images.name}: {result['accuracy']:.2%} of {len(images.test_labels)} test pictures")


if __name__ == "__main__":
    main()
