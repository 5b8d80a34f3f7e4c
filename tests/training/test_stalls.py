"""A rank that stands still in user code is named, with step and parameters, and the job ends."""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterator, Tuple

import pytest
from mxnet import autograd, gluon, nd

from ..pool import Ended, Shape, run_once
from .problems import batches, make_trainer, network, train_step
from .telling import telling, worker_rank

# Where there are servers the other ranks wait for their leader, whose agent takes seconds to start.
WARNING, ABORT_S, ABORT_SERVERS_S = ("GLUON_ESGD_STALL_WARNING_S", "1"), "4", "20"


def stands_still(where: str, worker: str) -> None:
    """Three steps; then `worker` deadlocks ahead of the fourth, or of what `where` says."""
    from gluon_esgd import metric_average

    net = network()
    trainer = make_trainer(net, **({} if where != "center" else {"interval": 2}))
    x, y = batches()
    with telling(silent=(int(worker),)):
        for i in range(3):
            train_step(net, trainer, x[i], y[i])
        nd.waitall()
        if worker_rank() == int(worker):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=50)
        if where == "step":
            train_step(net, trainer, x[3], y[3])
        elif where == "allreduce_grads":
            with autograd.record():
                loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(nd.array(x[3])), nd.array(y[3]))
            loss.backward()
            trainer.allreduce_grads()
        elif where == "metric":
            metric_average(1.0)
        elif where == "center":
            with trainer.center(sync=True):
                pass
        trainer.finish()


def _job(*shape: Any, algorithm: str = "auto", **more: str) -> Shape:
    abort = ABORT_SERVERS_S if shape[2:] and shape[2] else ABORT_S
    settings = {"STALL_ABORT_S": abort, "ALGORITHM": algorithm, **more}
    named = tuple((f"GLUON_ESGD_{name}", value) for name, value in settings.items())
    return Shape(*shape, settings=(WARNING, *named))


_NAME = r"gradient bucket 0 \(\w+_bias to \w+_weight, 4 parameters\), step 4"
_HERE, _THERE = r"; on this node rank\(s\) \[%d\] have not come to it", r"; on other nodes rank"
_FOR = ", for agent, servers or other clients"

# The job, what it does, the worker that stands still; what is said of it, and how it ends.
CASES: Dict[str, Tuple[Shape, str, int, str, str]] = {
    **{
        name: (_job(3, algorithm=name), "step", 2, f"rank 0 of 3 waits in {_NAME}{_HERE % 2}", "")
        for name in ("shared", "ring", "library")
    },
    "hierarchical": (
        _job(4, algorithm="hierarchical", NODES="2,2"),
        "step",
        3,
        rf"rank 0 of 4 waits in {_NAME}{_THERE}\(s\) \[3\] have not come to it",
        "",
    ),
    "silent": (
        _job(3, algorithm="ring", NODES="2,1"),
        "step",
        2,
        rf"rank 1 of 3 waits in {_NAME}{_THERE}\(s\) \[2\] do not answer",
        "",
    ),
    "allreduce_grads": (_job(2), "allreduce_grads", 1, f"0 of 2 waits in {_NAME}{_HERE % 1}", ""),
    "finish": (
        _job(2),
        "finish",
        0,
        f"1 of 2 waits in the check of weights, step 3{_HERE % 0}",
        "",
    ),
    "metric": (_job(2), "metric", 1, f"rank 0 of 2 waits in metric_average{_HERE % 1}", ""),
    "sgd clients": (
        _job(4, 2, 1, "sgd"),
        "step",
        2,
        f"client 0: rank 0 waits in the sum over clients of {_NAME}{_FOR}",
        f"{_NAME}, seen by rank 1: rank 0: client 0: no answer within 18 s to the sum of",
    ),
    "split sgd": (
        _job(4, 2, 0, "sgd"),
        "step",
        3,
        f"client 0: rank 0 waits in the sum over clients of {_NAME}, for other clients",
        rf"{_NAME}, seen by rank 1: rank 0: client 0 of 2 waits in .*client\(s\) \[1\] have not",
    ),
    "center": (
        _job(4, 2, 1, "esgd"),
        "center",
        2,
        rf"client 0: rank 0 waits in the center \(sync=True\) of 'trainer0', step 3{_FOR}",
        "CenterError: client 0: not all clients came within 18 s to the pull of 'trainer0'",
    ),
}


@pytest.fixture(scope="module")
def ended() -> Iterator[Callable[[str], Ended]]:
    """How jobs ended that were started side by side, as they mostly wait."""
    longest_first = sorted(CASES, key=lambda name: -CASES[name][0].servers)
    jobs: Dict[str, Future[Ended]] = {}
    with ThreadPoolExecutor(4) as pool:
        for name in longest_first:
            shape, where, worker, _, _ = CASES[name]
            jobs[name] = pool.submit(run_once, shape, stands_still, where, str(worker), timeout=90)
        yield lambda name: jobs[name].result(115)


@pytest.mark.servers
@pytest.mark.mpi
@pytest.mark.parametrize("name", CASES)
def test_who_stands_still_is_named(ended: Callable[[str], Ended], name: str) -> None:
    *_, warned, told = CASES[name]
    code, output, _ = ended(name)
    assert code != 0
    assert re.search(rf"{warned}; waited \d s so far", output), output
    assert re.search(told or rf"StallError: .*{warned}; gave up after \d s", output), output
