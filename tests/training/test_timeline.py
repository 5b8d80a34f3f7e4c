"""Communication begins while backward still runs, as MXNet's own profiler sees it."""

import mxnet as mx
import pytest
from mxnet import autograd, gluon, profiler
from mxnet.gluon import nn

from benchmarks import timeline
from gluon_esgd import ElasticTrainer, world

from ..pool import Shape, run_once

LAYERS, WIDTH, BATCH = 24, 256, 256  # backward takes tens of milliseconds
SHAPE = Shape(2, settings=(("GLUON_ESGD_BUCKET_BYTES", str(4 * 4 * WIDTH * WIDTH)),))


def train_under_the_profiler(path):
    """Take some steps; the leader writes the trace."""
    net = nn.HybridSequential()
    for number in range(LAYERS):
        net.add(nn.Dense(WIDTH, activation="relu", in_units=WIDTH, prefix=f"layer{number}_"))
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    samples, loss = mx.nd.ones((BATCH, WIDTH)), gluon.loss.L2Loss()

    def step():
        with autograd.record():
            out = loss(net(samples), samples)
        out.backward()
        trainer.step(BATCH)
        mx.nd.waitall()

    step()
    if world().is_leader:
        profiler.set_config(profile_symbolic=True, profile_imperative=True, filename=path)
        profiler.set_state("run")
    for number in range(3):
        event = profiler.Event(f"step {number}")
        event.start()
        step()
        event.stop()
    if world().is_leader:
        profiler.set_state("stop")
        profiler.dump()


@pytest.mark.mpi
def test_first_bucket_begins_before_backward_ends(tmp_path):
    path = tmp_path / "trace.json"
    ended = run_once(SHAPE, train_under_the_profiler, str(path))
    assert ended.code == 0, ended.output
    found = timeline.steps(timeline.read(path))
    assert len(found) == 3
    for step in found:
        buckets, backward = timeline.buckets(step), timeline.backward(step)
        starts = [buckets[number].start_ms for number in sorted(buckets)]
        assert len(starts) > 4  # several layers in each
        assert starts == sorted(starts)
        assert starts[0] > backward.start_ms  # its gradients have to be there
        assert starts[0] < backward.end_ms
