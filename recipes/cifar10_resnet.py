"""ResNet-20 on CIFAR-10: augmented pictures, a schedule, and a run that survives restarts.

    python recipes/cifar10_resnet.py                                          # one process
    mpirun -n 2 python recipes/cifar10_resnet.py                              # one client
    gluon-esgd run -n 4 --clients 2 --rule esgd --interval 8 python recipes/cifar10_resnet.py

`--data DIR` takes CIFAR-10 as Gluon stores it (data_batch_1.bin to 5, test_batch.bin), or IDX
files. Unless given: CIFAR-10 where Gluon has stored it, else 8,000 pictures of Fashion-MNIST or of
scikit-learn's digits; nothing is downloaded. CIFAR-10 is given `--epochs 200` as a rule. Started
again it goes on from the newest checkpoint in `--folder`, in mid-epoch too. Measured on
two cores, Fashion-MNIST: 83 % in one process, 78 % as two clients; about 80 and 95 s of CPU time.
"""

import argparse
import os
from typing import Any, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.data.vision import transforms
from mxnet.gluon.model_zoo.vision import BasicBlockV1, ResNetV1

from gluon_esgd import ElasticTrainer, local_context, settings, world
from gluon_esgd.checkpoint import TrainingState
from gluon_esgd.data import ShardSampler, load_images
from gluon_esgd.metrics import evaluate
from gluon_esgd.optim import EpochSchedule, no_weight_decay
from gluon_esgd.telemetry import TrainingLog

BATCH_SIZE, LOADERS = 32, 0  # of each rank: pictures in a step, processes that load them
LEARNING_RATE = 0.1  # the highest, for 128 pictures in a step of the client
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of CIFAR-10


class LocalCIFAR10(gluon.data.vision.CIFAR10):
    """Gluon's own, but where that would download this says which file it misses."""

    def _get_data(self) -> None:
        for name, sha1 in self._train_data + self._test_data:
            path = os.path.join(self._root, name)
            if not os.path.isfile(path) or not gluon.utils.check_sha1(path, sha1):
                raise FileNotFoundError(f"{path} is missing or is not that of CIFAR-10")
        super()._get_data()


def pictures(folder: Optional[str]) -> Tuple[str, Any, Any]:
    """Return the name of what was found, what to train on and what to test on."""
    root = folder or os.path.join(mx.base.data_dir(), "datasets", "cifar10")
    if os.path.isfile(os.path.join(root, "data_batch_1.bin")):
        return "CIFAR-10", LocalCIFAR10(root, train=True), LocalCIFAR10(root, train=False)
    found = load_images(folder)
    few = found.train_images[:8000], found.test_images[:2000]
    train, test = (mx.nd.array(x[..., None].repeat(3, axis=3), dtype="uint8") for x in few)
    data = gluon.data.ArrayDataset
    return found.name, data(train, found.train_labels[:8000]), data(test, found.test_labels[:2000])


def random_crop(picture: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return as large a picture, (height, width, channels), of it and a black margin: 4 of 32."""
    height, width, _ = picture.shape
    margin, (top, left) = height // 8, np.random.randint(0, 2 * (height // 8) + 1, 2)
    padded = np.pad(picture.asnumpy(), ((margin, margin), (margin, margin), (0, 0)))
    return mx.nd.array(padded[top : top + height, left : left + width], dtype="uint8")


def main() -> None:
    """Train, and say after each epoch what the center knows."""
    me, parser = world(), argparse.ArgumentParser(description="ResNet-20 on CIFAR-10.")
    parser.add_argument("--data", help="folder with CIFAR-10's .bin files, or with IDX files")
    parser.add_argument("--epochs", type=int, default=3, help="passes of the job over the data")
    folder = settings.read().job_dir or os.path.join("runs", "cifar10_resnet")
    parser.add_argument("--folder", default=folder, help="for checkpoints")
    args = parser.parse_args()
    for module in (mx, np):  # each rank crops in its own way; the trainer makes networks alike
        module.random.seed(me.worker_rank)
    ctx = local_context()
    name, train_set, test_set = pictures(args.data)
    tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    augment = [gluon.nn.Lambda(random_crop), transforms.RandomFlipLeftRight(), *tensor]
    sampler = ShardSampler(len(train_set))
    train_set = train_set.transform_first(transforms.Compose(augment))
    train = gluon.data.DataLoader(train_set, BATCH_SIZE, sampler=sampler, num_workers=LOADERS)
    mine = test_set.shard(me.size, me.rank).transform_first(transforms.Compose(tensor))
    test = gluon.data.DataLoader(mine, BATCH_SIZE)  # each picture once in the client
    net = ResNetV1(BasicBlockV1, [3, 3, 3], [16, 16, 32, 64], classes=10, thumbnail=True)
    net.initialize(mx.init.Xavier(magnitude=2), ctx=ctx)
    net.hybridize(static_alloc=True)
    loss_fn, steps = gluon.loss.SoftmaxCrossEntropyLoss(), len(train)
    schedule = EpochSchedule("cosine", LEARNING_RATE * BATCH_SIZE * me.size / 128, args.epochs, 0.3)
    sgd = {"lr_scheduler": schedule, "momentum": 0.9, "wd": 1e-4}
    trainer = ElasticTrainer(no_weight_decay(net.collect_params()), "sgd", sgd)
    state = TrainingState(net, trainer, sampler=sampler, folder=args.folder, every_s=300)

    def tell(when: str) -> None:
        with trainer.center():  # all clients: rule sgd averages over the job
            if me.client == 0:
                batches = ((x.as_in_context(ctx), y.as_in_context(ctx)) for x, y in test)
                right = evaluate(net, batches, mx.metric.Accuracy())["accuracy"]
        if me.is_main:
            print(f"{name}, {when}: the center knows {right:.2%} of the test pictures", flush=True)

    with TrainingLog(trainer, args.epochs * steps) as log:
        for epoch in state.epochs(args.epochs):
            schedule.begin_epoch(epoch + state.batch / steps, steps, trainer.optimizer.num_update)
            for data, label in state.batches(train):
                data, label = data.as_in_context(ctx), label.as_in_context(ctx)
                with autograd.record():
                    loss = loss_fn(net(data), label)
                loss.backward()
                trainer.step(len(data))
                log.update(loss, len(data))
            tell(f"epoch {epoch + 1}")
    trainer.finish()
    tell("at the end")


if __name__ == "__main__":
    main()
