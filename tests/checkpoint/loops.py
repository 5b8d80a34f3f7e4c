"""A loop of a user's, run on the ranks of tests: whole, stopped somewhere, and gone on with."""

from __future__ import annotations

import hashlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon

from ..training.problems import CLASSES, FEATURES, batches, train_step

SAMPLES, BATCH, EPOCHS = 48, 4, 3
OPTIMIZERS: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}),
    "adam": ("adam", {"learning_rate": 0.01}),
}


class Stopped(Exception):
    """What ends a loop in a test, where a kill would."""


class Outcome(NamedTuple):
    """What a loop leaves."""

    weights: str
    seen: List[Tuple[int, int]]  # epoch and batch of each batch of this life
    statistics: List[float]


def normalized(dropout: float = 0.0, hidden: int = 16) -> gluon.nn.HybridSequential:
    """The small classifier with batch normalization, and dropout where it is asked for."""
    mx.random.seed(0)
    np.random.seed(0)
    net = gluon.nn.HybridSequential(prefix="")
    net.add(
        gluon.nn.Dense(hidden, activation="tanh", in_units=FEATURES),
        gluon.nn.BatchNorm(in_channels=hidden),
        gluon.nn.Dropout(dropout),
        gluon.nn.Dense(CLASSES, in_units=hidden),
    )
    net.initialize(mx.init.Xavier())
    return net


def make(folder: str, optimizer: str = "momentum", **settings: Any) -> Tuple[Any, Any, Any, Any]:
    """Network, trainer, state and loader, as a script makes them at each start."""
    from gluon_esgd import ElasticTrainer, checkpoint
    from gluon_esgd.data import ShardSampler

    net = normalized(settings.pop("dropout", 0.0), settings.pop("hidden", 16))
    name, arguments = OPTIMIZERS[optimizer]
    more = {"interval": settings.pop("interval")} if "interval" in settings else {}
    trainer = ElasticTrainer(net.collect_params(), name, dict(arguments), **more)
    x, y = batches(1, SAMPLES)
    data = gluon.data.ArrayDataset(x[0], y[0])
    sampler = ShardSampler(SAMPLES, seed=3)
    loader = gluon.data.DataLoader(
        data, settings.pop("batch", BATCH), sampler=sampler, last_batch="keep"
    )
    state = checkpoint.TrainingState(net, trainer, sampler=sampler, folder=folder, **settings)
    return net, trainer, state, loader


def weights(net: Any) -> str:
    """A digest of what ranks have alike: all but running statistics."""
    named = net.collect_params().items()
    arrays = [p.data().asnumpy().tobytes() for name, p in named if "running" not in name]
    return hashlib.sha256(b"".join(arrays)).hexdigest()


def statistics(net: Any) -> List[float]:
    """The running statistics."""
    named = net.collect_params().items()
    arrays = [p.data().asnumpy() for name, p in named if "running" in name]
    return [float(value) for array in arrays for value in array]


def run(
    folder: str,
    optimizer: str = "momentum",
    stop: Optional[Tuple[int, int]] = None,
    before: Optional[Callable[[int, int], None]] = None,
    **settings: Any,
) -> Optional[Outcome]:
    """The loop; with `stop` it ends before this batch of this epoch, and nothing is returned."""
    net, trainer, state, loader = make(folder, optimizer, **settings)
    seen = []
    try:
        for epoch in state.epochs(EPOCHS):
            for x, y in state.batches(loader):
                seen.append((epoch, state.batch))
                if seen[-1] == stop:
                    raise Stopped
                if before is not None:
                    before(epoch, state.batch)
                train_step(net, trainer, x.asnumpy(), y.asnumpy())
    except Stopped:
        return None
    return Outcome(weights(net), seen, statistics(net))


def positions(folder: str, client: int = 0) -> List[Tuple[int, int]]:
    """Epoch and batch of each checkpoint of a client, the newest first."""
    from gluon_esgd.checkpoint.folder import entries, folder_of

    return [entry[1:3] for entry in entries(folder_of(folder, client))]
