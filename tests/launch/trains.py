"""A script that trains in whole jobs, with all that belongs to it: checkpoints, shares, the center.

``-m tests.launch.trains EPOCHS RATE`` prints first "begins with D", a digest of its weights, at the
start of each epoch "epoch E batches B of N place P alpha A", and at the end "center D loss L". It
trains EPOCHS, or fewer where the file ``enough`` comes into the folder of the job. Other clients
than the first begin with other weights.
"""

import hashlib
import os
import sys
import time

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluon_esgd import ElasticTrainer, broadcast_object, world
from gluon_esgd.checkpoint import TrainingState
from gluon_esgd.data import ShardSampler
from gluon_esgd.job import job

SAMPLES, FEATURES, BATCH = 48, 4, 4
PACE_S = 0.02  # between steps, so that others come to something on few cores


def problem():
    """Samples that a linear layer can fit."""
    chance = np.random.RandomState(5)
    x = chance.randn(SAMPLES, FEATURES).astype(np.float32)
    return mx.nd.array(x), mx.nd.array(x @ chance.randn(FEATURES, 1).astype(np.float32))


def digest(net):
    return hashlib.sha256(net.weight.data().asnumpy().tobytes()).hexdigest()[:16]


def main(epochs, rate):
    me = world()
    mx.random.seed(me.client)
    net = gluon.nn.Dense(1, in_units=FEATURES, use_bias=False, prefix="net_")
    net.initialize(mx.init.Normal(1.0))
    print("begins with", digest(net), flush=True)
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": float(rate)})
    x, y = problem()
    sampler = ShardSampler(SAMPLES, seed=1)
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), BATCH, sampler=sampler)
    state, loss_of = TrainingState(net, trainer, sampler=sampler), gluon.loss.L2Loss()
    for epoch in state.epochs(int(epochs)):
        clients, place = job().clients_now()
        alpha = job().policy.alpha_for(clients)
        told = f"epoch {epoch} batches {len(loader)} of {clients} place {place} alpha {alpha:.3f}"
        print(told, flush=True)
        for data, label in state.batches(loader):
            with autograd.record():
                loss = loss_of(net(data), label)
            loss.backward()
            trainer.step(len(data))
            loss.wait_to_read()
            time.sleep(PACE_S)
        if broadcast_object(os.path.exists(os.path.join(me.settings.job_dir, "enough"))):
            break
    trainer.finish()
    with trainer.center():
        found = float(loss_of(net(x), y).mean().asscalar())
        print("center", digest(net), f"loss {found:.6f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
