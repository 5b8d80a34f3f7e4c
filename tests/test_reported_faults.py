"""Reported faults that no other file tests; test_field_reports.py lists them all by number."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any, Iterator, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from gluon_esgd.center import CenterLink
from gluon_esgd.errors import CenterError
from gluon_esgd.optim.elastic import weight_change

from .center.servers import free_port
from .pool import ROOT, Pools, Shape, environment, label, run_once
from .training.problems import batches, network, train_step
from .training.telling import telling, train_and_tell, worker_rank, workers_that_raised

# 8: unequal numbers of batches.

SAMPLES, OF_A_BATCH = 101, 50


def train_an_epoch(sharing: str) -> None:
    from gluon_esgd import ElasticTrainer, metric_average, world
    from gluon_esgd.data import ShardSampler

    x, y = batches(1, SAMPLES)
    data = gluon.data.ArrayDataset(x[0], y[0])
    net, me = network(), world()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    if sharing == "sampler":
        loader = gluon.data.DataLoader(data, OF_A_BATCH, sampler=ShardSampler(SAMPLES, 1))
    else:
        loader = gluon.data.DataLoader(data.shard(me.size, me.rank), OF_A_BATCH)
    with telling():
        for data, label in loader:
            train_step(net, trainer, data.asnumpy(), label.asnumpy())
        metric_average({"steps": trainer.counters.steps})
        trainer.finish()
    print(f"\nworker {me.worker_rank} made {trainer.counters.steps} steps\n", flush=True)


LIMITS = (("GLUON_ESGD_STALL_WARNING_S", "1"), ("GLUON_ESGD_STALL_ABORT_S", "3"))


@pytest.mark.mpi
def test_8_the_sampler_gives_equal_counts() -> None:
    ended = run_once(Shape(2, settings=LIMITS), train_an_epoch, "sampler")
    assert ended.code == 0, ended.output
    assert sorted(re.findall(r"worker (\d) made (\d) steps", ended.output)) == [
        ("0", "2"), ("1", "2")
    ]  # fmt: skip


@pytest.mark.mpi
def test_8_without_it_the_missing_rank_is_named() -> None:
    """51 and 50 samples are 2 batches and 1."""
    ended = run_once(Shape(2, settings=LIMITS), train_an_epoch, "shard", timeout=40)
    assert ended.code != 0 and workers_that_raised(ended.output)
    assert re.search(r"rank 0 is in gradient bucket 0 .*, step 2, rank 1 in ", ended.output)


# 9: the end of a job.


def unequal_work() -> None:
    train_and_tell(4 if worker_rank() == 0 else 60, lambda i, _: None, interval=4)
    print(f"\nworker {worker_rank()} ended at {time.time()}\n", flush=True)


@pytest.mark.servers
def test_9_the_job_ends_with_its_last_worker() -> None:
    ended = run_once(Shape(3, 3, 1, "esgd"), unequal_work)
    now = time.time()
    assert ended.code == 0, ended.output
    last = [float(t) for t in re.findall(r"worker \d ended at ([\d.]+)", ended.output)]
    assert len(last) == 3 and now - max(last) < 15


# 18: what learning rate a rule takes.

FEATURES, PER_WORKER, STEPS = 4, 400, 200


def logistic(worker: int) -> Tuple[np.ndarray, np.ndarray]:
    """Samples of one worker; labels 0 and 1 with noise, so that the minimum is finite."""
    truth = np.array([1.5, -2.0, 0.5, 1.0], np.float32)
    random = np.random.RandomState(worker)
    x = random.randn(PER_WORKER, FEATURES).astype(np.float32)
    return x, (random.rand(PER_WORKER) < 1 / (1 + np.exp(-(x @ truth)))).astype(np.float32)


def loss_and_gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> Tuple[float, np.ndarray]:
    score = x @ w
    loss = np.mean(np.logaddexp(0, score) - y * score)
    return float(loss), x.T @ (1 / (1 + np.exp(-score)) - y) / len(x)


def whole_set(workers: int) -> Tuple[np.ndarray, np.ndarray]:
    x, y = zip(*map(logistic, range(workers)))
    return np.concatenate(x), np.concatenate(y)


def largest_rate(x: np.ndarray) -> float:
    """Above 2 / L gradient descent is not stable near every minimum; this is half of it."""
    return float(4 * len(x) / np.linalg.eigvalsh(x.T @ x)[-1])


def least_loss(x: np.ndarray, y: np.ndarray) -> float:
    w = np.zeros(FEATURES)
    for _ in range(3000):
        loss, gradient = loss_and_gradient(w, x, y)
        w -= largest_rate(x) * gradient
    return loss


def center_after_200_steps(rule: str, rate: float) -> np.ndarray:
    from gluon_esgd import ElasticTrainer

    x, y = (mx.nd.array(a) for a in logistic(worker_rank()))
    net = gluon.nn.Dense(1, in_units=FEATURES, use_bias=False)
    net.initialize(mx.init.Zero())
    loss_of = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    settings = {} if rule == "sgd" else {"interval": 8 if rule == "esgd" else 1}
    trainer = ElasticTrainer(
        net.collect_params(), "sgd", {"learning_rate": rate}, rule=rule, **settings
    )
    for _ in range(STEPS):
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(x))
    trainer.finish()
    with trainer.center(sync=True):
        return net.weight.data().asnumpy().ravel()


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(2, 2, 1, r) for r in ("sgd", "asgd", "esgd")], ids=label)
def test_18_three_rules_reach_the_minimum(pools: Pools, shape: Shape) -> None:
    """`sgd` and `esgd` at the plain rate, `asgd` at that divided by the clients."""
    clients, rule = shape.clients, str(shape.rule)
    x, y = whole_set(clients)
    rate = largest_rate(x) / (clients if rule == "asgd" else 1)
    ranks = pools.get(shape).run(center_after_200_steps, rule, rate)
    least = least_loss(x, y)
    # The center of esgd lies between the minima of the clients' own samples.
    losses = [loss_and_gradient(w, x, y)[0] for w in ranks]
    assert losses == pytest.approx([least] * clients, rel=0.03)
    assert least < 0.8 * np.log(2)


def test_18_accumulated_changes_need_a_smaller_rate() -> None:
    """Clients that start from one center and add up their changes step as far as all of them."""
    clients = 8
    x, y = whole_set(clients)
    least, losses = least_loss(x, y), {}
    for divided_by in (1, clients):
        center = np.zeros(FEATURES)
        for _ in range(STEPS):
            gradients = [loss_and_gradient(center, *logistic(k))[1] for k in range(clients)]
            new = [center - largest_rate(x) / divided_by * gradient for gradient in gradients]
            center = center + sum(weight_change(w, center) for w in new)
        losses[divided_by] = loss_and_gradient(center, x, y)[0]
    assert losses[clients] < 1.001 * least and losses[1] > 1.1 * least


def test_18_the_docs_say_so() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert re.search(r"`esgd` keeps it for any number\s+of clients", page)
    assert re.search(r"`asgd` adds up the changes of all clients: divide it by about", page)


# 20: start-up.


@pytest.fixture
def parameter_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Scheduler and server at ``localhost``, with the PORT that many sites set."""
    monkeypatch.setenv("PORT", "80")
    started: List[subprocess.Popen] = []

    def start(num_clients: int) -> str:
        address = f"localhost:{free_port()}"
        env = environment(
            GLUON_ESGD_SCHEDULER=address,
            GLUON_ESGD_NUM_CLIENTS=str(num_clients),
            GLUON_ESGD_NUM_SERVERS="1",
        )
        module = [sys.executable, "-m", "gluon_esgd.center.server"]
        started.extend(subprocess.Popen([*module, r], env=env) for r in ("scheduler", "server"))
        return address

    yield start
    for process in started:
        process.kill()
        process.wait()


def links(address: str, started: int, announced: int, **options: Any) -> List[CenterLink]:
    return [
        CenterLink(address, client=i, num_clients=announced, num_servers=1, sync=False, **options)
        for i in range(started)
    ]


@pytest.mark.servers
def test_20_a_missing_client_is_named_in_time(parameter_server: Any, tmp_path: Any) -> None:
    """Three clients are announced and two are started."""
    address = parameter_server(3)
    made = links(address, 2, 3, job_dir=str(tmp_path), start_timeout_s=4.0)
    start = time.monotonic()
    said = rf"waits for 3 clients and 1 servers at the scheduler {address} .*not seen: 2"
    try:
        for link in made:
            with pytest.raises(CenterError, match=said):
                link.wait_ready()
        assert time.monotonic() - start < 10
    finally:
        for link in made:
            link.close()


@pytest.mark.servers
def test_20_a_name_and_a_foreign_port_do_no_harm(parameter_server: Any) -> None:
    assert os.environ["PORT"] == "80"
    made = links(parameter_server(2), 2, 2, start_timeout_s=60.0)
    try:
        for link in made:
            link.wait_ready()
    finally:
        for link in made:
            link.close()


# 23: numpy.


def test_23_numpy_is_pinned() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^    "numpy>=1\.20,<1\.24"', project, re.M)
    assert re.search(r'^requires-python = ">=3\.8,<3\.12"', project, re.M)


NEW_NUMPY = """
import numpy
had = numpy.__getattr__
def without_bool(name):
    if name == "bool":
        raise AttributeError("module 'numpy' has no attribute 'bool'")
    return had(name)
numpy.__getattr__ = without_bool
"""


@pytest.mark.parametrize("name", ["ElasticTrainer", "ElasticSGD"])
def test_23_a_new_numpy_is_named_with_what_to_install(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{NEW_NUMPY}\nfrom gluon_esgd import {name}"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=environment(),
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: MXNet cannot be imported (module 'numpy' has no attribute")
    assert f"needs numpy below 1.24, which is {np.__version__}, and Python 3.8 to 3.11" in last
    assert last.endswith("pip install mxnet==1.9.1 'numpy<1.24'")


# 24: stalls.


def one_rank_sleeps() -> None:
    train_and_tell(5, lambda i, _: time.sleep(5 if (i, worker_rank()) == (3, 1) else 0))
    print(f"\nworker {worker_rank()} came to its end\n", flush=True)


@pytest.mark.mpi
def test_24_a_stall_is_told_and_the_run_goes_on() -> None:
    limit = (("GLUON_ESGD_STALL_WARNING_S", "2"),)
    ended = run_once(Shape(2, settings=limit), one_rank_sleeps)
    assert ended.code == 0, ended.output
    assert ended.output.count("came to its end") == 2
    assert re.search(
        r"rank 0 of 2 waits in gradient bucket 0 .*dense\d+_weight.*, step 4; on this node "
        r"rank\(s\) \[1\] have not come to it; waited [2-4] s so far",
        ended.output,
    ), ended.output


# 25: which elastic averaging.


def test_25_the_docs_state_equations_order_and_timing() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert r"d = \alpha\,(x - c), \qquad x \leftarrow x - d, \qquad c \leftarrow c + d" in page
    assert r"c \leftarrow c + u, \qquad x \leftarrow c + (x_\mathrm{now} - x)" in page
    assert r"g = \frac{\sum_i g_i}{\sum_i b_i}" in page
    assert "arxiv.org/abs/1412.6651" in page and "Momentum is not touched" in page
    assert "Exchanges are asynchronous: no client waits for another" in page
    assert re.search(r"the gradient step is taken on its\s+own", page)
