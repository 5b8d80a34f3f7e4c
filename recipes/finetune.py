"""Fine-tuning: a pre-trained body with frozen layers, a new head, two learning rates.

    python recipes/finetune.py                                                # one process
    mpirun -n 2 python recipes/finetune.py                                    # one client
    gluon-esgd run -n 4 --clients 2 --rule esgd --interval 8 python recipes/finetune.py

`--params resnet50_v1.params --model resnet50_v1 --data DIR` takes a ResNet v1 of Gluon's model zoo
and pictures of yours: DIR/train/CLASS and DIR/val/CLASS, or what `gluon-esgd data` makes of them.
Without --params a small ResNet learns every second class of local pictures (IDX files in DIR,
Fashion-MNIST, scikit-learn's digits), and then the others from 10 pictures of each; so does one
that knows nothing: with a new head alone 80 % against 58 % of it on Fashion-MNIST, two clients 75
and 44 %, in 25 and 50 s of CPU on two cores.
"""

import argparse
from typing import Any, Optional

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.data.vision import transforms as T
from mxnet.gluon.model_zoo.vision import BasicBlockV1, ResNetV1, get_model

from gluon_esgd import ElasticTrainer, local_context, vision, world
from gluon_esgd.data import ShardSampler, load_images
from gluon_esgd.metrics import evaluate
from gluon_esgd.telemetry import TrainingLog

EPOCHS, BATCH_SIZE = 40, 25  # pictures in a step of each rank
SGD, SLOWER = {"learning_rate": 0.05, "momentum": 0.9}, 0.1  # times that for a body's last stage
TENSOR = (T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def local_pictures(folder: Optional[str], first: int, most: int) -> vision.PictureData:
    """Return pictures of every second class from `first` on, to train on so many of each."""
    me, found = world(), load_images(folder)
    classes = range(first, found.num_classes, 2)

    def pick(images: np.ndarray, labels: np.ndarray, most: int) -> gluon.data.Dataset:
        mine = np.concatenate([np.flatnonzero(labels == k)[:most] for k in classes])
        three = mx.nd.array(images[mine][..., None].repeat(3, axis=3), dtype="uint8")
        data = gluon.data.ArrayDataset(three, labels[mine] // 2)
        return data.transform_first(T.Compose([*TENSOR]))

    train = pick(found.train_images, found.train_labels, most)
    test = pick(found.test_images, found.test_labels, 400)
    loader, sampler = gluon.data.DataLoader, ShardSampler(len(train))
    mine = test.shard(me.size, me.rank)
    height, width = found.train_images.shape[1:]
    known = (found.name, found.source, len(classes), (3, height, width), len(train), len(test))
    batches = loader(train, BATCH_SIZE, sampler=sampler)
    return vision.PictureData(*known, batches, sampler, lambda: iter(loader(mine, BATCH_SIZE)))


def train(net: Any, data: vision.PictureData, epochs: int, ctx: mx.Context, frozen: int) -> float:
    """Train all but the first `frozen` layers; leave the center in `net`, return its accuracy."""
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    body, stage = net.features[:frozen], net.features[frozen:]
    body.collect_params().setattr("grad_req", "null")
    stage.collect_params().setattr("grad_req", "write")  # not of running statistics: Gluon knows
    stage.collect_params().setattr("lr_mult", SLOWER if frozen else 1)
    trainer = ElasticTrainer(net.collect_params(), "sgd", SGD)
    data.sampler.set_epoch(0)
    with TrainingLog(trainer, epochs * len(data.train)) as log:
        for x, label in (batch for _ in range(epochs) for batch in data.train):
            below = body(x.as_in_context(ctx))  # not recorded: BatchNorm goes by what it knows
            with autograd.record():
                loss = loss_fn(net.output(stage(below)), label.as_in_context(ctx))
            loss.backward()
            trainer.step(len(x))
            log.update(loss, len(x))
    trainer.finish()
    with trainer.center(sync=True):  # the same for all clients, which go on from it
        moved = ((x.as_in_context(ctx), y.as_in_context(ctx)) for x, y in data.validation())
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
    parser.add_argument("--data", help="folder with train/CLASS and val/CLASS, or IDX files")
    parser.add_argument("--output", help="file for the parameters that come of it")
    args = parser.parse_args()
    if args.params and not args.data:
        parser.error("--params needs --data DIR with train/CLASS and val/CLASS")
    ctx = local_context()
    if args.params:
        plain, classes = vision.Augmentation(jitter=0, pca_noise=0), mx.nd.load(args.params)
        data = vision.open_pictures(args.data, batch_size=BATCH_SIZE, augmentation=plain)
        nets = {"pre-trained": get_model(args.model, classes=len(classes["output.bias"]))}
        nets["pre-trained"].load_parameters(args.params, ctx=ctx)
    else:
        half, data = (local_pictures(args.data, k, most) for k, most in ((0, 1200), (1, 10)))
        small = (BasicBlockV1, [1, 1, 1], [16, 16, 32, 64], half.num_classes, True)  # 32 pixels
        nets = {name: ResNetV1(*small) for name in ("random", "pre-trained")}
        for net in nets.values():
            net.initialize(mx.init.Xavier(), ctx=ctx)
        train(nets["pre-trained"], half, 18_000 // half.train_count, ctx, frozen=0)
    for name, net in nets.items():
        net.output = gluon.nn.Dense(data.num_classes)
        net.output.initialize(mx.init.Xavier(), ctx=ctx)
        head, both = (train(net, data, EPOCHS, ctx, frozen) for frozen in (-1, -2))
        if me.is_main:
            print(f"{name} body: {head:.2%} with a new head, {both:.2%} with its last stage too")
    if args.output and me.is_main:
        net.save_parameters(args.output)


if __name__ == "__main__":
    main()
