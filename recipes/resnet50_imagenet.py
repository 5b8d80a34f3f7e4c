"""ResNet-50 on ImageNet by elastic averaging; without data of yours, a small network in minutes.

    gluon-esgd run -n 4 --clients 2 --servers 1 --rule esgd python recipes/resnet50_imagenet.py

trains three convolutions on Fashion-MNIST (Debian's dataset-fashion-mnist), else scikit-learn's
digits. `--data DIR` takes RecordIO (train.rec, val.rec: `gluon-esgd data FOLDER --to DIR`), class
folders (train/, val/) or IDX files; `--synthetic N`: noise. For ImageNet, --data /data/imagenet:

    one machine, 8 GPUs  gluon-esgd run -n 8 python ... (a client; or --clients 2 --rule esgd)
    host file            gluon-esgd run --clients 4 --servers 4 --hostfile hosts python ...
    Slurm, LSF           the same inside of a job script that names the hosts, docs/clusters.md;
                         as in the paper: LSF, -n 12 -R "span[ptile=2]", --clients 2

Expected top-1 of the center after 90 epochs: 0.72 in the paper (arXiv 1801.03855), 0.77 or so in
modern recipes (synchronous, longer, --label-smoothing 0.1 --mixup 0.2). We have reproduced neither;
docs/results.md says what two cores could do. To classify a picture with what was exported:

    net = gluon.SymbolBlock.imports("center-symbol.json", ["data"], "center-0000.params")
    print(net(gluon_esgd.vision.prepare("cat.jpg")).argmax(axis=1))
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp

from gluon_esgd import ElasticTrainer, checkpoint, local_context, settings, vision, world
from gluon_esgd.metrics import evaluate, share_with_main
from gluon_esgd.optim import SCHEDULES, EpochSchedule, no_weight_decay
from gluon_esgd.telemetry import TrainingLog


def arguments() -> argparse.Namespace:
    """Return the command line; what depends on the data is None."""
    parser = argparse.ArgumentParser(description="Train on ImageNet or a small stand-in.")
    add, folder = parser.add_argument, settings.read().job_dir
    add("--data", help="folder of RecordIO, of class folders, or of IDX files")
    add("--synthetic", type=int, metavar="N", help="N pictures of noise an epoch")
    add("--model", help="Gluon's or GluonCV's (resnet50_v1), or small (for IDX files)")
    add("--image-size", type=int, default=224)
    add("--dtype", choices=["float32", "float16", "amp"], default="float32")
    add("--epochs", type=int, help="passes of the job over the data (90; fewer for IDX files)")
    add("--batch-size", type=int, default=64, help="of each rank")
    add("--accumulate", type=int, default=1, help="batches of a rank in an update")
    add("--lr", type=float, help="highest learning rate, for 256 pictures an update (0.1)")
    add("--schedule", choices=SCHEDULES, default="cosine")
    add("--warmup-epochs", type=float, help="a twentieth of the epochs unless given")
    add("--momentum", type=float, default=0.9)
    add("--wd", type=float, default=1e-4, help="weight decay, not of biases and BatchNorm")
    add("--label-smoothing", type=float, default=0.0)
    add("--mixup", type=float, default=0.0, metavar="ALPHA")
    add("--jitter", type=float, default=0.4, help="of brightness, contrast and saturation")
    add("--pca-noise", type=float, default=0.1)
    add("--smallest-crop", type=float, default=0.08, help="share of a picture")
    add("--threads", type=int, help="that decode, in each rank")
    add("--seed", type=int, default=0)
    add("--output", default=folder or "runs/resnet50_imagenet")
    add("--resume", choices=["auto", "none"], default="auto", help="go on from OUTPUT")
    add("--checkpoint-s", type=float, default=600.0, help="seconds between checkpoints")
    args = parser.parse_args()
    kept = Path(args.output, "checkpoints", f"client{world().client}")
    if args.resume == "none" and world().settings.life == 0 and kept.is_dir():
        parser.error(f"{kept} is of an earlier run: give another --output, or --resume auto")
    for name in ("epochs", "batch_size", "accumulate", "synthetic"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if args.dtype != "float32" and not mx.context.num_gpus():
        parser.error(f"--dtype {args.dtype} needs a GPU: on CPUs MXNet has no such operators")
    return args


def open_data(args: argparse.Namespace) -> vision.PictureData:
    """Return the pictures; settle what depends on them, and say what will be done."""
    me, crop = world(), (args.smallest_crop, 1.0)
    names = ("batch_size", "image_size", "seed", "threads")
    pictures = vision.open_pictures(
        args.data,
        augmentation=vision.Augmentation(crop, jitter=args.jitter, pca_noise=args.pca_noise),
        synthetic=args.synthetic and (args.synthetic, 1000),
        **{name: getattr(args, name) for name in names},
    )
    small, args.classes = pictures.shape[0] == 1, pictures.num_classes
    args.model = args.model or ("small" if small else "resnet50_v1")
    args.epochs = args.epochs or ((6 if pictures.train_count >= 10_000 else 60) if small else 90)
    args.warmup_epochs = args.epochs / 20 if args.warmup_epochs is None else args.warmup_epochs
    ranks = me.num_workers if settings.read().rule == "sgd" else me.size  # that share a gradient
    rate = (0.2 if small else 0.1) if args.lr is None else args.lr
    batch = args.batch_size * args.accumulate * ranks
    args.lr = rate * batch / 256
    if me.is_main:
        hint = "" if args.data else "; for ImageNet: --data DIR with train.rec and val.rec"
        print(
            f"data: {pictures.name} ({pictures.train_count:,} pictures, {pictures.source}); "
            f"network: {args.model} for {args.classes} classes{hint}\n"
            f"batch: {args.batch_size} x {args.accumulate} x {ranks} rank(s) = {batch} an update, "
            f"{me.num_clients} client(s), {len(pictures.train)} batches an epoch; learning rate: "
            f"{rate:g} x {batch}/256 = {args.lr:g}",
            flush=True,
        )
    return pictures


def make_network(args: argparse.Namespace, ctx: mx.Context) -> gluon.HybridBlock:
    """Return the network, ready to train."""
    net = vision.get_network(args.model, args.classes)
    vision.zero_last_gamma(net)
    net.initialize(mx.init.Xavier(magnitude=2), ctx=ctx)
    net.cast("float16" if args.dtype == "float16" else "float32")
    net.hybridize(static_alloc=True, static_shape=True)
    net.collect_params().setattr("grad_req", "add" if args.accumulate > 1 else "write")
    return net


def make_trainer(args: argparse.Namespace, net: gluon.HybridBlock) -> ElasticTrainer:
    """Return the trainer."""
    schedule = EpochSchedule(args.schedule, args.lr, args.epochs, args.warmup_epochs)
    options = {"lr_scheduler": schedule, "momentum": args.momentum, "wd": args.wd}
    options["multi_precision"] = args.dtype == "float16"
    trainer = ElasticTrainer(no_weight_decay(net.collect_params()), "nag", options)
    if args.dtype == "amp":
        amp.init_trainer(trainer)
    return trainer


def train_on(args: argparse.Namespace, net: gluon.HybridBlock, trainer: ElasticTrainer) -> Callable:
    """Return a function that trains on a batch and returns loss, top-1 and top-5 of each sample."""
    soft = bool(args.label_smoothing or args.mixup)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=not soft)

    def train(data: mx.nd.NDArray, label: mx.nd.NDArray, number: int, of: int) -> Dict[str, Any]:
        is_last = number % args.accumulate == 0 or number == of
        if args.accumulate > 1 and number % args.accumulate == 1:
            net.collect_params().zero_grad()
        target = vision.soft_labels(label, args.classes, args.label_smoothing) if soft else label
        if args.mixup:
            data, target = vision.mixup(data, target, args.mixup)
        with autograd.record():
            scores = net(data).astype("float32", copy=False)
            loss = loss_fn(scores, target)
            whole = args.dtype != "amp"
            with nullcontext(loss) if whole else amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        with nullcontext() if is_last else trainer.no_sync():
            trainer.step(len(data))
        hits = mx.nd.topk(scores, k=min(5, args.classes)) == label.expand_dims(1)
        return {"loss": loss, "top_1": hits[:, 0], "top_5": hits.sum(axis=1)}

    return train


def moved(args: argparse.Namespace, data: Any) -> Iterator[Tuple[mx.nd.NDArray, mx.nd.NDArray]]:
    """Go through the batches of `data` on this rank's device, in the network's type."""
    ctx, dtype = local_context(), "float16" if args.dtype == "float16" else "float32"
    return ((x.as_in_context(ctx).astype(dtype, copy=False), y.as_in_context(ctx)) for x, y in data)


def score(args: argparse.Namespace, net: Any, pictures: Any, whose: str) -> Dict[str, float]:
    """Return top-1 and top-5 of what `net` holds now, over the ranks of the client."""
    top_5 = mx.metric.TopKAccuracy(min(5, args.classes), name="top")
    metric = mx.metric.CompositeEvalMetric([mx.metric.Accuracy(name="top_1"), top_5])
    found = evaluate(net, moved(args, pictures.validation()), metric)
    return {f"{whose}/{name}": value for name, value in found.items()}


def train_epochs(args: argparse.Namespace, net: Any, trainer: Any, pictures: Any) -> TrainingLog:
    """Train what is left and evaluate each epoch; return the log."""
    me, train, path = world(), train_on(args, net, trainer), f"{args.output}/checkpoints"
    options = {"folder": path, "every_s": args.checkpoint_s, "background": True}
    state = checkpoint.TrainingState(net, trainer, sampler=pictures.sampler, **options)
    settled = {name: value for name, value in vars(args).items() if value is not None}
    checkpoint.go_on(state, args.epochs, settled, "--output NEW")
    steps, best = len(pictures.train), checkpoint.BestExport(f"{args.output}/best")
    done, logdir = state.epoch * steps + state.batch, f"{args.output}/tensorboard"
    with TrainingLog(trainer, args.epochs * steps, logdir, first_step=done) as log:
        log.hyperparameters(settled, ["loss", "center/top_1"])
        for epoch in state.epochs(args.epochs):
            batches, optimizer = len(pictures.train), trainer.optimizer
            begun, updates = epoch + state.batch / batches, -(-batches // args.accumulate)
            optimizer.lr_scheduler.begin_epoch(begun, updates, optimizer.num_update)
            for data, label in moved(args, state.batches(pictures.train, through=log.batches)):
                log.update(batch_size=len(data), **train(data, label, state.batch + 1, batches))
            with log.paused():
                result = score(args, net, pictures, "client") if me.num_clients > 1 else {}
                with trainer.center():  # all clients: under rule sgd they make it together
                    if me.client == 0:
                        result.update(score(args, net, pictures, "center"))
                        best.offer(net, result["center/top_1"])
            log.epoch(epoch, **result)
    return log


def main() -> None:
    """Train, evaluate each epoch, export the center, and show what it took."""
    args, me = arguments(), world()
    if args.dtype == "amp":
        amp.init()
    pictures = open_data(args)
    alone = vision.input_rate(pictures)
    for module in (mx, np):  # ranks vary pictures each in its way; networks are made alike
        module.random.seed(args.seed + me.worker_rank)
    net = make_network(args, local_context())
    trainer = make_trainer(args, net)
    log = train_epochs(args, net, trainer, pictures)
    trainer.finish()
    own = {"input_per_s": me.size * alone, **log.totals(), **score(args, net, pictures, "client")}
    clients = share_with_main(own, timeout_s=300)  # all have made their last exchange
    path = Path(args.output, "result.json")  # that of a run that is done stays
    with trainer.center():
        if me.client == 0:
            found = {**score(args, net, pictures, "center"), "clients": clients}
            if me.is_main and (any(c and c["samples"] for c in clients) or not path.exists()):
                checkpoint.export(net, f"{args.output}/center")
                path.write_text(json.dumps(found, indent=1))
                print(report(pictures, args, found), flush=True)


def report(pictures: vision.PictureData, args: argparse.Namespace, result: Dict[str, Any]) -> str:
    """Return the table at the end."""
    clients = [client for client in result["clients"] if client]
    total = {name: sum(client[name] for client in clients) for name in clients[0]}
    passes = total["samples"] / pictures.train_count  # since this start

    def hits(whose: str, found: Dict[str, float]) -> str:
        top_1, top_5 = (found[f"{whose}/top_{k}"] for k in (1, min(5, args.classes)))
        return f"{top_1:.2%}, top-5 {top_5:.2%}"

    rows = [("top-1 of the center", f"{hits('center', result)} of {pictures.validation_count:,}")]
    for k, client in enumerate(result["clients"]):
        rows.append((f"top-1 of client {k}", hits("client", client) if client else "not reported"))
    rows += [
        ("images/s in all", f"{total['images_per_s']:,.0f} (input: {total['input_per_s']:,.0f})"),
        ("waiting for input", f"{total['input_share'] / len(clients):.1%} of the time"),
        ("training time", f"{clients[0]['seconds']:.0f} s for {passes:.4g} epochs"),
        ("bytes into collectives", f"{total['collective_bytes'] / 1e6:,.1f} MB over all ranks"),
        ("bytes to and from servers", f"{total['server_bytes'] / 1e6:,.1f} MB over all clients"),
        ("exchanges made", f"{total['exchanges']:,.0f} by {len(clients)} client(s)"),
        ("curves", f"tensorboard --logdir {args.output}/tensorboard"),
        ("center", f"{args.output}/center-symbol.json, center-0000.params"),
    ]
    return "\n".join(f"{name:<26}{value}" for name, value in rows)


if __name__ == "__main__":
    main()
