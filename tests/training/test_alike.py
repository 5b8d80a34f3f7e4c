"""Processes that differ where they must be alike are told so, by name, on all ranks."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from typing import Any, List

import mxnet as mx
import pytest
from mxnet import gluon

from gluon_esgd.launch.proc import clean_shared_memory

from ..pool import OPEN_MPI_PYTHON, Pools, Shape, environment, mpiexec, run_once
from .problems import batches, network, train_step
from .telling import telling, worker_rank, workers_that_raised

PURE = pytest.mark.mpi


def clients_differ() -> None:
    from gluon_esgd import ElasticTrainer, world

    net = network(hidden=16 + world().client)
    trainer = ElasticTrainer(net.collect_params(), "sgd")
    x, y = batches()
    with telling():
        train_step(net, trainer, x[0], y[0])


@pytest.mark.servers
@pytest.mark.parametrize("rule", ["esgd", "sgd"])
def test_clients_with_other_networks_are_told(rule: str) -> None:
    ended = run_once(Shape(2, 2, 1, rule), clients_differ, timeout=60)
    assert ended.code != 0
    assert re.search(r"CenterError: .*shapes \(digest\): client 0 has \d+, ", ended.output)


def _params(kind: str) -> Any:
    """Parameters that rank 1 makes otherwise than the others."""
    other = worker_rank() == 1
    shape, dtype = (4, 3), "float32"
    names = ["a", "b", "c"]
    if other and kind == "name":
        names[1] = "x"
    if other and kind == "shape":
        shape = (4, 5)
    if other and kind == "dtype":
        dtype = "float64"
    if other and kind == "order":
        names = ["a", "c", "b"]
    if other and kind == "number":
        names = names[:2]
    made = [gluon.Parameter(n, shape=shape, dtype=dtype) for n in names]
    for param in made:
        param.initialize()
    return made


def _differ(kind: str) -> str:
    from gluon_esgd import ElasticTrainer

    try:
        ElasticTrainer(_params(kind), "sgd")
    except ValueError as error:
        return str(error)
    return "no error"


def _same_in(kind: str) -> bool:
    return _differ(kind) == "no error"


DIFFERENCES = {
    "name": "parameter 1 differs: rank 0 has b (4, 3) float32 write initialized, rank 1 has x",
    "shape": "parameter 0 differs: rank 0 has a (4, 3) float32 write initialized, rank 1 has a (4, 5)",  # noqa: E501
    "dtype": "parameter 0 differs: rank 0 has a (4, 3) float32 write initialized, rank 1 has a (4, 3) float64",  # noqa: E501
    "order": "parameter 1 differs: rank 0 has b (4, 3) float32 write initialized, rank 1 has c",
    "number": "rank 0 has 3 parameters, rank 1 has 2",
}


@PURE
@pytest.mark.parametrize("shape", [Shape(3)], ids=lambda s: s.workers)
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_parameters_that_differ_are_named_on_all_ranks(
    pools: Pools, shape: Shape, kind: str
) -> None:
    for said in pools.get(shape).run(_differ, kind):
        assert said.startswith(DIFFERENCES[kind]), said
    assert all(pools.get(shape).run(_same_in, "none"))


def deferred_shapes_differ() -> None:
    from gluon_esgd import ElasticTrainer

    net = gluon.nn.Dense(3)
    net.initialize()
    ElasticTrainer(net.collect_params(), "sgd")
    with telling():
        net(mx.nd.ones((2, 5 + worker_rank())))


@PURE
def test_deferred_shapes_that_differ_are_named() -> None:
    ended = run_once(Shape(2), deferred_shapes_differ, timeout=30)
    assert ended.code != 0
    assert workers_that_raised(ended.output) == ["0", "1"]
    assert "dense0_weight (3, 5) float32, rank 1 has dense0_weight (3, 6)" in ended.output


def _crossed(python: str, starter: str) -> str:
    # mpiexec ends the other rank when the first one fails: both are to say theirs before.
    call = "import atexit, time, gluon_esgd; atexit.register(time.sleep, 1); gluon_esgd.world()"
    since = time.time()
    done = subprocess.run(
        [*mpiexec(starter), "-n", "2", python, "-c", call],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        text=True,
    )
    clean_shared_memory(since)
    assert done.returncode != 0
    return done.stdout


@PURE
def test_mpiexec_of_another_vendor_is_an_error_on_all_ranks() -> None:
    here, there = sys.executable, OPEN_MPI_PYTHON
    assert _crossed(here, there).count("probably of another vendor") == 2
    assert _crossed(there, here).count("probably of another vendor") == 2


def test_announced_ranks_without_mpiexec_are_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import gluon_esgd; gluon_esgd.world()"],
        env=environment(GLUON_ESGD_CLIENT_SIZE="4"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "started as one of 4 ranks, but MPI sees 1" in done.stderr


def settings_differ(name: str) -> None:
    from gluon_esgd import ElasticTrainer

    value = {
        "interval": 2 + worker_rank(),
        "lazy": worker_rank(),
        "outer": {"momentum": worker_rank() / 4},
        "compression_params": [None, {"type": "fp16"}][worker_rank()],
    }[name]
    with telling():
        ElasticTrainer(network().collect_params(), "sgd", rule="esgd", **{name: value})


@pytest.mark.servers
@pytest.mark.parametrize("name", ["interval", "lazy", "outer", "compression_params"])
def test_settings_that_differ_over_ranks_are_named(name: str) -> None:
    ended = run_once(Shape(2, 1, 1, "esgd"), settings_differ, name)
    assert ended.code != 0 and workers_that_raised(ended.output) == ["0", "1"]
    said = name.replace("_params", "")
    wanted = rf"setting \d differs: rank 0 has {said} .+, rank 1 has {said} .+; all ranks"
    assert re.search(wanted, ended.output)


def said_of_a_rule_without_a_center() -> List[str]:
    from gluon_esgd import ElasticTrainer

    said: List[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gluon_esgd").addHandler(handler)
    try:
        ElasticTrainer(network().collect_params(), "sgd", rule="esgd")
    finally:
        logging.getLogger("gluon_esgd").removeHandler(handler)
    return said


@pytest.mark.mpi
def test_what_holds_for_all_ranks_is_said_by_one(pools: Pools) -> None:
    (line,), *others = pools.get(Shape(2)).run(said_of_a_rule_without_a_center)
    assert "has no center: using 'sgd'" in line and others == [[]]


def one_rank_asks_for_its_world() -> None:
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        time.sleep(60)
    from gluon_esgd import world

    world()


@PURE
def test_a_first_call_that_a_rank_does_not_make_is_bounded() -> None:
    limits = (("GLUON_ESGD_START_TIMEOUT_S", "2"),)
    ended = run_once(Shape(2, settings=limits), one_rank_asks_for_its_world, timeout=40)
    assert ended.code != 0
    assert re.search(r"Timeout \(0:00:02\).*in _with_all_ranks_that", ended.output, re.DOTALL)


def another_learning_rate() -> None:
    """As a schedule by a validation loss that every rank measures for itself brings about."""
    net = network()
    from gluon_esgd import ElasticTrainer

    trainer = ElasticTrainer(net.collect_params(), "adam", {"learning_rate": 0.1, "wd": 0.01})
    with telling():
        for step, (x, y) in enumerate(zip(*batches())):
            if step == 3 and worker_rank() == 1:
                trainer.set_learning_rate(trainer.learning_rate / 2)
            train_step(net, trainer, x, y)
            mx.nd.waitall()


@PURE
@pytest.mark.parametrize("nodes", ["2", "1,1"])
def test_ranks_with_other_learning_rates_are_told_at_the_next_step(nodes: str) -> None:
    ended = run_once(Shape(2, settings=(("GLUON_ESGD_NODES", nodes),)), another_learning_rate)
    assert ended.code != 0
    assert workers_that_raised(ended.output) == ["0", "1"]
    said = (
        r"step 4, seen by rank \d: learning rate and wd must be the same on all ranks, "
        r"got \[\[0.1, 0.01\], \[0.05, 0.01\]\] by rank"
    )
    assert len(re.findall(said, ended.output)) == 2, ended.output
