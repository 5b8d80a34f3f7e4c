"""Elastic averaging from a laptop to ImageNet: one loop, the data chooses the network.

    gluon-esgd run -n 4 --clients 2 --servers 1 --rule esgd python recipes/resnet50_imagenet.py

trains, without data of yours, a small convolutional network on Fashion-MNIST where it is found
(Debian's package dataset-fashion-mnist), else on scikit-learn's digits. `--data DIR` takes IDX
files, or ImageNet as RecordIO (train.rec, train.idx, val.rec, val.idx) and with it ResNet-50 v1:

    gluon-esgd run -n 16 --clients 4 --servers 4 --rule esgd --hosts a:8,b:8 \
        python recipes/resnet50_imagenet.py --data /data/imagenet

An epoch is one pass of the whole job over the data: each worker has its share.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from itertools import islice
from typing import Any, Callable, Dict, Iterator, Tuple

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

from gluon_esgd import ElasticTrainer, settings, world
from gluon_esgd.data import EqualBatches, RecordShard, ShardSampler, load_images, record_shard
from gluon_esgd.metrics import evaluate, share_with_main
from gluon_esgd.telemetry import TrainingLog

Batches = Iterator[Tuple[mx.nd.NDArray, mx.nd.NDArray]]


def arguments() -> argparse.Namespace:
    """Return the command line; unset defaults depend on the data."""
    folder = settings.read().job_dir or os.path.join("runs", "resnet50_imagenet")
    parser = argparse.ArgumentParser(description="Train on ImageNet or a small stand-in.")
    parser.add_argument("--data", help="folder with IDX files, or train.rec and val.rec")
    parser.add_argument("--epochs", type=int, help="passes of the job over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-samples", type=int, help="train on the first so many only")
    parser.add_argument("--output", default=folder, help="folder for checkpoint and result")
    parser.add_argument("--logdir", help="folder for TensorBoard (OUTPUT/tensorboard)")
    args = parser.parse_args()
    args.logdir = args.logdir or os.path.join(args.output, "tensorboard")
    return args


@dataclass
class Task:
    """What to train on what: all that differs between ImageNet and its stand-ins."""

    data: str
    network: str
    net: gluon.HybridBlock
    train: Callable[[], Batches]  # an endless stream of this worker's share
    test: Callable[[], Batches]  # this rank's part: each sample once in the client
    steps: int  # of each worker in an epoch
    num_test: int
    epochs: int  # unless the command line says another number


def small_task(args: argparse.Namespace) -> Task:
    """Return a small network for IDX files or what the machine has."""
    me, images = world(), load_images(args.data)
    train_images, train_labels = images.train_images[: args.limit_samples], images.train_labels
    sampler = ShardSampler(len(train_images), seed=args.seed)

    def load(x: Any, y: Any, **kwargs: Any) -> gluon.data.DataLoader:
        dataset = gluon.data.ArrayDataset(x[:, None], y)
        return gluon.data.DataLoader(dataset, args.batch_size, **kwargs)

    train = load(train_images, train_labels[: len(train_images)], sampler=sampler)
    mine = slice(me.rank, None, me.size)
    test = load(images.test_images[mine], images.test_labels[mine])

    net = nn.HybridSequential()
    net.add(nn.HybridLambda(lambda F, x: F.cast(x, "float32") / 255))
    for channels in (32, 64, 128):
        net.add(nn.Conv2D(channels, 3, padding=1, use_bias=False), nn.BatchNorm())
        net.add(nn.Activation("relu"), nn.MaxPool2D(2, padding=1))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(images.num_classes))
    return Task(
        data=f"{images.name} ({len(train_images):,} pictures, {images.source})",
        network="three convolutions with BatchNorm",
        net=net,
        train=lambda: (batch for _ in iter(int, 1) for batch in train),
        test=lambda: iter(test),
        steps=len(train),
        num_test=len(images.test_labels),
        epochs=6 if len(train_images) >= 10_000 else 60,
    )


def imagenet_task(args: argparse.Namespace) -> Task:
    """Return ResNet-50 v1 at 224 pixels for RecordIO files."""
    me, folder, size = world(), args.data, args.batch_size
    train = record_shard(os.path.join(folder, "train.rec"), batch_size=size, seed=args.seed)
    val = os.path.join(folder, "val.rec")
    test = record_shard(val, batch_size=size, num_parts=me.size, part_index=me.rank)
    train_count = min(train.records, args.limit_samples or train.records)
    steps = min(train.batches_per_epoch, -(-train_count // (me.num_workers * size)))
    crop = {"min_random_area": 0.08, "max_random_area": 1.0}
    ratio = {"min_aspect_ratio": 3 / 4, "max_aspect_ratio": 4 / 3}
    augment = {"random_resized_crop": True, "rand_mirror": True, **crop, **ratio}
    batches = EqualBatches(_reader(train, shuffle=True, **augment), steps)
    return Task(
        data=f"ImageNet ({train_count:,} pictures, {folder})",
        network="ResNet-50 v1 at 224 pixels",
        net=gluon.model_zoo.vision.resnet50_v1(),
        train=lambda: ((b.data[0], b.label[0]) for _ in iter(batches.reset, 1) for b in batches),
        test=lambda: test.each_once(_reader(test, resize=256)),
        steps=steps,
        num_test=test.records,
        epochs=90,
    )


def _reader(shard: RecordShard, **options: Any) -> mx.io.DataIter:
    mean = {"mean_r": 123.68, "mean_g": 116.779, "mean_b": 103.939}
    std = {"std_r": 58.393, "std_g": 57.12, "std_b": 57.375}
    return mx.io.ImageRecordIter(
        **shard.arguments,
        data_shape=(3, 224, 224),
        preprocess_threads=len(os.sched_getaffinity(0)),
        **{**mean, **std, **options},
    )


def choose(args: argparse.Namespace) -> Task:
    """Return the task for the data that there is, and say which; settle the epochs."""
    is_imagenet = args.data and os.path.isfile(os.path.join(args.data, "train.rec"))
    task = imagenet_task(args) if is_imagenet else small_task(args)
    args.epochs = args.epochs or task.epochs
    if world().is_main:
        hint = "" if args.data else "; for ImageNet: --data DIR with train.rec and val.rec"
        print(f"data: {task.data}; network: {task.network}{hint}", flush=True)
    return task


def main() -> None:
    """Train, evaluate the center, save it, and show what it took."""
    args, me = arguments(), world()
    mx.random.seed(args.seed)
    gpus = mx.context.num_gpus()
    ctx = mx.gpu(me.local_rank % gpus) if gpus else mx.cpu()
    task = choose(args)
    net, steps = task.net, args.epochs * task.steps
    net.initialize(mx.init.Xavier(magnitude=2), ctx=ctx)
    net.hybridize(static_alloc=True)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    schedule = mx.lr_scheduler.CosineScheduler(steps, args.lr, warmup_steps=steps // 20)
    options = {"lr_scheduler": schedule, "momentum": args.momentum, "wd": 1e-4}
    trainer = ElasticTrainer(net.collect_params(), "sgd", options)

    def move(batches: Batches) -> Batches:
        return ((x.as_in_context(ctx), y.as_in_context(ctx)) for x, y in batches)

    def accuracy() -> float:
        return evaluate(net, move(task.test()), mx.metric.Accuracy())["accuracy"]

    batches, samples, seconds = move(task.train()), 0, 0.0
    with TrainingLog(trainer, steps=steps, logdir=args.logdir) as log:
        for _ in range(args.epochs):
            start = time.monotonic()
            for data, label in islice(batches, task.steps):
                with autograd.record():
                    scores = net(data)
                    loss = loss_fn(scores, label)
                loss.backward()
                trainer.step(len(data))
                right = scores.argmax(axis=1) == label.astype("float32")
                log.update(loss, len(data), accuracy=right)
                samples += len(data)
            mx.nd.waitall()
            seconds += time.monotonic() - start
            with log.paused(), trainer.center():  # all clients: sgd averages over the job
                if me.client == 0:
                    log.scalar("center_accuracy", accuracy())
    trainer.finish()

    mine = {"accuracy": accuracy(), **totals(trainer, samples / seconds)}
    clients = share_with_main(mine, timeout_s=300)  # all have made their last exchange
    with trainer.center():
        if me.client == 0:
            result = {"center": accuracy(), "seconds": seconds, "clients": clients}
            if me.is_main:
                save(net, args.output, result)
                print(report(task, args, result), flush=True)


def totals(trainer: ElasticTrainer, images_per_s: float) -> Dict[str, float]:
    """Return what this client did, over its ranks; collective in the client."""
    ranks = world().allgather({**trainer.counters.as_dict(), "images_per_s": images_per_s})
    summed = ("images_per_s", "collective_bytes", "server_bytes")
    return {"exchanges": ranks[0]["exchanges"], **{k: sum(r[k] for r in ranks) for k in summed}}


def save(net: gluon.HybridBlock, folder: str, result: Dict[str, Any]) -> None:
    """Write the network's present weights and the result; whole files or none."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "center.params")
    net.save_parameters(path + ".new")
    os.replace(path + ".new", path)
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump(result, file, indent=1)


def report(task: Task, args: argparse.Namespace, result: Dict[str, Any]) -> str:
    """Return the table at the end."""
    clients = result["clients"]
    total = {key: sum(c[key] for c in clients if c) for key in clients[0]}
    rows = [("accuracy of the center", f"{result['center']:.2%} of {task.num_test:,} pictures")]
    for k, c in enumerate(clients):
        rows.append((f"accuracy of client {k}", f"{c['accuracy']:.2%}" if c else "not reported"))
    rows += [
        ("images/s in all", f"{total['images_per_s']:,.0f}"),
        ("training time", f"{result['seconds']:.0f} s for {args.epochs} epochs"),
        ("bytes into collectives", f"{total['collective_bytes'] / 1e6:,.1f} MB over all ranks"),
        ("bytes to and from servers", f"{total['server_bytes'] / 1e6:,.1f} MB over all clients"),
        ("exchanges made", f"{total['exchanges']:,.0f} by {len(clients)} client(s)"),
        ("curves", f"tensorboard --logdir {args.logdir}"),
        ("checkpoint", os.path.join(args.output, "center.params")),
    ]
    return "\n".join(f"{name:<26}{value}" for name, value in rows)


if __name__ == "__main__":
    main()
