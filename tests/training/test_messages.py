"""What a distributed run refuses, and with which words; no process is started."""

from __future__ import annotations

import logging
from typing import Any, Dict, Iterator

import mxnet as mx
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer, topology
from gluon_esgd import job as job_module
from gluon_esgd.errors import TopologyError
from gluon_esgd.settings import Settings
from gluon_esgd.topology import World

from .problems import network


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[job_module.Job]:
    """A job whose one client has this process only, and a server that nobody asks."""
    settings = Settings(num_servers=1, scheduler="127.0.0.1:9")
    world = World(settings=settings)
    made = job_module.Job(world, job_module.lane())
    monkeypatch.setattr(made, "link", lambda: None)
    monkeypatch.setattr(job_module, "_job", made)
    yield made
    made._unfinished.clear()


def _trainer(params: Any = None, optimizer: Any = "sgd", **kwargs: Any) -> ElasticTrainer:
    return ElasticTrainer(params or network().collect_params(), optimizer, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"compression_params": {"type": "2bit"}}, r"compression_params=\{'type': '2bit'\} is not"),
        ({"compression_params": {"type": "fp16", "threshold": 1}}, "use {'type': 'fp16'}, or"),
        ({"outer": {"momentum": 0.9}, "rule": "sgd"}, "outer=.*: there is no center to move"),
        ({"rule": "esgd", "optimizer": "ftrl"}, "optimizer 'ftrl' computes its weights anew"),
    ],
)
def test_arguments(shared: job_module.Job, kwargs: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _trainer(**kwargs)


class _Store(mx.kvstore.KVStore):
    type = "dist_sync"

    def __init__(self) -> None:
        self.handle = None

    def __del__(self) -> None:
        pass


def test_a_distributed_store_as_an_object(shared: job_module.Job) -> None:
    with pytest.raises(ValueError, match=r"kvstore='dist_sync' as an object .*World\(client=0"):
        _trainer(kvstore=_Store())


def test_row_sparse_parameters(shared: job_module.Job) -> None:
    net = gluon.nn.Embedding(50, 4, sparse_grad=True)
    net.initialize()
    with pytest.raises(ValueError, match=r"parameter 'embedding\d+_weight' is row-sparse"):
        _trainer(net.collect_params())


def test_update_on_kvstore_is_taken_with_one_warning(
    shared: job_module.Job, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _trainer(update_on_kvstore=True)
    assert ["the optimizer runs on the workers" in r.message for r in caplog.records] == [True]


def test_a_second_rule(shared: job_module.Job) -> None:
    _trainer(rule="esgd")
    with pytest.raises(ValueError, match=r"rule='asgd', but an earlier trainer .* has 'esgd'"):
        _trainer(rule="asgd")


@pytest.mark.parametrize(
    ("name", "first", "second", "message"),
    [
        (
            "outer",
            {"momentum": 0.9},
            None,
            r"outer=Outer\(momentum=0.0, .* has Outer\(momentum=0.9",
        ),
        ("compression_params", None, {"type": "fp16"}, "compression='fp16', .* has None"),
    ],
)
def test_what_belongs_to_the_job(
    shared: job_module.Job, name: str, first: Any, second: Any, message: str
) -> None:
    _trainer(rule="esgd", **{name: first})
    with pytest.raises(ValueError, match=message):
        _trainer(rule="esgd", **{name: second})


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (0, ValueError, "batch_size=0 must be above 0"),
        (-3, ValueError, "batch_size=-3 must be above 0"),
        (float("nan"), ValueError, "batch_size=nan must be above 0"),
        (1 << 24, ValueError, "below 16777216 samples"),
        ("8", TypeError, "batch_size='8' must be a number of samples"),
        (None, TypeError, "batch_size=None must be a number of samples"),
    ],
)
def test_batch_sizes(shared: job_module.Job, batch: Any, error: type, message: str) -> None:
    trainer = _trainer(rule="sgd")
    with pytest.raises(error, match=message):
        trainer.step(batch)


def test_devices_are_reduced_where_there_is_only_a_server(shared: job_module.Job) -> None:
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = network(ctx=contexts)
    trainer = _trainer(net.collect_params(), rule="sgd")
    for i, context in enumerate(contexts):
        with mx.autograd.record():
            loss = net(mx.nd.ones((2, 6), ctx=context) * (i + 1)).sum()
        loss.backward()
    trainer.step(4)
    for param in net.collect_params().values():
        first, second = (param.data(c).asnumpy() for c in contexts)
        assert (first == second).all()


@pytest.mark.parametrize(
    ("settings", "environ", "message"),
    [
        ({"client": 2, "num_clients": 2}, {}, "client number 2 is not below the number of clients"),
        ({"client_size": 4}, {}, "started as one of 4 ranks, but MPI sees 1"),
        ({"num_clients": 4}, {}, "NUM_CLIENTS=4 splits .* no mpirun .* start with `mpirun -n 8 "),
        ({"client": 1, "num_clients": 2}, {}, "NUM_CLIENTS=2 with .*CLIENT=1 means clients that"),
        (
            {"num_clients": 2, "client_size": 2},
            {"PMI_RANK": "0"},
            "started as one of 4 ranks, but MPI sees 1",
        ),
    ],
)
def test_worlds_that_cannot_be(
    settings: Dict[str, Any], environ: Dict[str, str], message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        topology._make(Settings(**settings), environ)


def test_an_unknown_algorithm_names_the_variable(
    shared: job_module.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(num_servers=1, scheduler="127.0.0.1:9", algorithm="tree")
    monkeypatch.setattr(shared, "world", World(settings=settings))
    with pytest.raises(ValueError, match="GLUON_ESGD_ALGORITHM='tree' must be one of auto, "):
        _trainer(rule="sgd")
