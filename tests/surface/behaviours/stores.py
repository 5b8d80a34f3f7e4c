"""What scripts say about stores; in a distributed run there is none in the trainer."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..registry import DISTRIBUTED, Refused, theme
from ..scripts import BATCH, MOMENTUM, PLAIN, mlp, train, weights

behaviour = theme("Stores, compression, sparse parameters")


def _with(Trainer, share, **kwargs):
    net = mlp()
    train(net, Trainer(net.collect_params(), *MOMENTUM, **kwargs), share)
    return weights(net)


@behaviour("`kvstore='device'`")
def device_store(Trainer, share):
    return _with(Trainer, share, kvstore="device")


@behaviour("`kvstore='local'`")
def local_store(Trainer, share):
    return _with(Trainer, share, kvstore="local")


@behaviour("`kvstore=None`")
def no_store(Trainer, share):
    return _with(Trainer, share, kvstore=None)


@behaviour("a local KVStore object")
def local_store_object(Trainer, share):
    return _with(Trainer, share, kvstore=mx.kv.create("local"))


@behaviour("`kvstore='dist_sync'`")
def dist_sync(Trainer, share):
    return _with(Trainer, share, kvstore="dist_sync")


@behaviour("`kvstore='dist_device_sync'`")
def dist_device_sync(Trainer, share):
    return _with(Trainer, share, kvstore="dist_device_sync")


@behaviour("`kvstore='dist_async'`")
def dist_async(Trainer, share):
    return _with(Trainer, share, kvstore="dist_async")


class _DistStore(mx.kvstore.KVStore):
    """As ``mx.kv.create('dist_sync')`` would give in a job of MXNet's own."""

    type = "dist_sync"

    def __init__(self):
        self.handle = None

    def __del__(self):
        pass


@behaviour(
    "a distributed KVStore object",
    Refused(
        DISTRIBUTED,
        r"^ValueError: kvstore='dist_sync' as an object cannot be used",
        "Two distributed stores in one process hang, and the agents have theirs: pass the name as "
        "a string.",
    ),
)
def dist_store_object(Trainer, share):
    net = mlp()
    Trainer(net.collect_params(), *MOMENTUM, kvstore=_DistStore())
    return weights(net)


@behaviour("`update_on_kvstore=False`")
def update_in_trainer(Trainer, share):
    return _with(Trainer, share, update_on_kvstore=False)


@behaviour(
    "`update_on_kvstore=True`",
    Refused(
        ("one process",),
        r"^AttributeError: 'NoneType' object has no attribute 'is_capable'",
        "As in Gluon, which makes no store for one device.",
    ),
)
def update_on_default_store(Trainer, share):
    return _with(Trainer, share, update_on_kvstore=True)


@behaviour("`kvstore='dist_async', update_on_kvstore=True`")
def update_on_store(Trainer, share):
    return _with(Trainer, share, kvstore="dist_async", update_on_kvstore=True)


@behaviour(
    "`compression_params={'type': '2bit'}`",
    Refused(
        DISTRIBUTED,
        r"^ValueError: compression_params=\{'type': '2bit', 'threshold': 0.5\} is not offered",
        "Ranks take exact means, and clients send changes of weights, which fit no threshold; "
        "`{'type': 'fp16'}` is taken.",
    ),
)
def two_bits(Trainer, share):
    compression = {"type": "2bit", "threshold": 0.5}
    return _with(Trainer, share, compression_params=compression)


_SPARSE = Refused(
    DISTRIBUTED,
    r"^ValueError: parameter '\w+' is row-sparse, which a distributed run does not exchange",
    "Ranks and clients exchange dense vectors; the error names the parameter. Make it dense "
    "(`sparse_grad=False`).",
)


@behaviour("row-sparse gradients", _SPARSE)
def sparse_gradients(Trainer, share):
    net = gluon.nn.Embedding(9, 3, sparse_grad=True)
    mx.random.seed(5)
    net.initialize(mx.init.Normal(0.1))
    trainer = Trainer(net.collect_params(), *PLAIN)
    for number in range(3):
        x = share(mx.nd.array(np.random.RandomState(number).randint(0, 9, BATCH)))
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(len(x))
    return weights(net)


class _SparseDot(gluon.Block):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get(
                "weight", shape=(9, 3), stype="row_sparse", grad_stype="row_sparse"
            )

    def forward(self, x):
        return mx.nd.sparse.dot(x, self.weight.row_sparse_data(x.indices.astype("int64")))


@behaviour("row-sparse weights", _SPARSE)
def sparse_weights(Trainer, share):
    net = _SparseDot()
    mx.random.seed(5)
    net.initialize(mx.init.Normal(0.1))
    trainer = Trainer(net.collect_params(), *PLAIN)
    for number in range(3):
        x = mx.nd.array(np.random.RandomState(number).rand(BATCH, 9) > 0.7).tostype("csr")
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(BATCH)
    every_row = mx.nd.arange(9, dtype="int64")
    return net.weight.row_sparse_data(every_row).asnumpy().ravel()
