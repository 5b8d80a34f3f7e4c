"""Fine-tuning: a pre-trained body with frozen layers, a new head, two learning rates.

    python recipes/finetune.py                                                # one process
    mpirun -n 2 python recipes/finetune.py                                    # one client
    gluon-esgd run -n 4 --clients 2 --rule esgd --interval 8 python recipes/finetune.py

`--params resnet50_v1.params --model resnet50_v1 --data DIR` takes a ResNet v1 of Gluon's model zoo
and pictures of yours, DIR/train/CLASS and DIR/test/CLASS. Without --params a small ResNet learns
every second class of local pictures (IDX files in DIR, Fashion-MNIST, scikit-learn's digits), and
then the others from 10 pictures of each; so does one that knows nothing: with a new head alone 80 %
against 58 % of it on Fashion-MNIST, two clients 75 and 44 %, in 25 and 50 s of CPU on two cores.
"""

import argparse
from typing import Any, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.data.vision import transforms as T
from mxnet.gluon.model_zoo.vision import BasicBlockV1, ResNetV1, get_model

from gluon_esgd import ElasticTrainer, local_context, world
from gluon_esgd.data import ShardSampler, load_images
from gluon_esgd.metrics import evaluate
from gluon_esgd.telemetry import TrainingLog

EPOCHS, BATCH_SIZE, LOADERS = 40, 25, 0  # pictures in a step and processes that load: of each rank
SGD, SLOWER = {"learning_rate": 0.05, "momentum": 0.9}, 0.1  # times that for a body's last stage
TENSOR = (T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def folder_sets(folder: str) -> Tuple[Any, Any, int]:
    """Return pictures in folders that are named by their classes."""
    crop = T.Compose([T.RandomResizedCrop(224), T.RandomFlipLeftRight(), *TENSOR])
    middle = T.Compose([T.Resize(256, keep_ratio=True), T.CenterCrop(224), *TENSOR])
    parts = (f"{folder}/{part}" for part in ("train", "test"))
    train, test = map(gluon.data.vision.ImageFolderDataset, parts)
    return train.transform_first(crop), test.transform_first(middle), len(train.synsets)


def local_sets(folder: Optional[str], first: int, most: int) -> Tuple[Any, Any, int]:
    """Return pictures of every second class from `first` on, to train on so many of each."""
    found = load_images(folder)
    classes = range(first, found.num_classes, 2)

    def pick(images: np.ndarray, labels: np.ndarray, most: int) -> gluon.data.Dataset:
        mine = np.concatenate([np.flatnonzero(labels == k)[:most] for k in classes])
        three = mx.nd.array(images[mine][..., None].repeat(3, axis=3), dtype="uint8")
        data = gluon.data.ArrayDataset(three, labels[mine] // 2)
        return data.transform_first(T.Compose([*TENSOR]))

    train = pick(found.train_images, found.train_labels, most)
    return train, pick(found.test_images, found.test_labels, 400), len(classes)


def train(net: Any, sets: Any, epochs: int, ctx: mx.Context, frozen: int) -> float:
    """Train all but the first `frozen` layers; leave the center in `net`, return its accuracy."""
    me, loss_fn = world(), gluon.loss.SoftmaxCrossEntropyLoss()
    body, stage = net.features[:frozen], net.features[frozen:]
    body.collect_params().setattr("grad_req", "null")
    stage.collect_params().setattr("grad_req", "write")  # not of running statistics: Gluon knows
    stage.collect_params().setattr("lr_mult", SLOWER if frozen else 1)
    trainer = ElasticTrainer(net.collect_params(), "sgd", SGD)
    mine, test = ShardSampler(len(sets[0])), sets[1].shard(me.size, me.rank)
    batches = gluon.data.DataLoader(sets[0], BATCH_SIZE, sampler=mine, num_workers=LOADERS)
    with TrainingLog(trainer, epochs * len(batches)) as log:
        for data, label in (batch for _ in range(epochs) for batch in batches):
            below = body(data.as_in_context(ctx))  # not recorded: BatchNorm goes by what it knows
            with autograd.record():
                loss = loss_fn(net.output(stage(below)), label.as_in_context(ctx))
            loss.backward()
            trainer.step(len(data))
            log.update(loss, len(data))
    trainer.finish()
    with trainer.center(sync=True):  # the same for all clients, which go on from it
        loader = gluon.data.DataLoader(test, BATCH_SIZE, num_workers=LOADERS)
        moved = ((x.as_in_context(ctx), y.as_in_context(ctx)) for x, y in loader)
        accuracy = evaluate(net, moved, mx.metric.Accuracy())["accuracy"]
        center = [param.data(ctx).copy() for param in net.collect_params().values()]
    for param, value in zip(net.collect_params().values(), center):
        param.set_data(value)
    return accuracy


def main() -> None:
    """Fine-tune, and say how many of the test pictures the center knows."""
    me, parser = world(), argparse.ArgumentParser(description="Fine-tune a ResNet.")
    parser.add_argument("--params", help="file with parameters of MODEL")
    parser.add_argument("--model", default="resnet50_v1", help="name in Gluon's model zoo")
    parser.add_argument("--data", help="folder with train/CLASS and test/CLASS, or IDX files")
    parser.add_argument("--output", help="file for the parameters that come of it")
    args = parser.parse_args()
    if args.params and not args.data:
        parser.error("--params needs --data DIR with train/CLASS and test/CLASS")
    ctx = local_context()
    if args.params:
        sets, classes = folder_sets(args.data), len(mx.nd.load(args.params)["output.bias"])
        nets = {"pre-trained": get_model(args.model, classes=classes)}
        nets["pre-trained"].load_parameters(args.params, ctx=ctx)
    else:
        half, sets = local_sets(args.data, 0, most=1200), local_sets(args.data, 1, most=10)
        small = (BasicBlockV1, [1, 1, 1], [16, 16, 32, 64], half[2], True)  # at 32 pixels or less
        nets = {name: ResNetV1(*small) for name in ("random", "pre-trained")}
        for net in nets.values():
            net.initialize(mx.init.Xavier(), ctx=ctx)
        train(nets["pre-trained"], half, 18_000 // len(half[0]), ctx, frozen=0)
    for name, net in nets.items():
        net.output = gluon.nn.Dense(sets[2])
        net.output.initialize(mx.init.Xavier(), ctx=ctx)
        head, both = (train(net, sets, EPOCHS, ctx, frozen) for frozen in (-1, -2))
        if me.is_main:
            print(f"{name} body: {head:.2%} with a new head, {both:.2%} with its last stage too")
    if args.output and me.is_main:
        net.save_parameters(args.output)


if __name__ == "__main__":
    main()
