"""An exchange hides behind the steps that follow its snapshot."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List

import mxnet as mx
import numpy as np
import pytest

from ..center.servers import servers
from ..pool import ROOT, environment
from .problems import batches, flat, network, train_step

STEPS, PACE_S, DELAY_S, LIMIT_S = 120, 0.03, 0.8, 100


def paced(interval: str, lazy: str) -> None:
    """Train at a fixed pace and print how it went."""
    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, interval=int(interval), lazy=int(lazy)
    )
    x, y = batches()
    train_step(net, trainer, x[0], y[0])
    slowest = 0.0
    for i in range(STEPS - 1):
        began = time.monotonic()
        train_step(net, trainer, x[i % 20], y[i % 20])
        net[1].bias.data().wait_to_read()
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(PACE_S)
    staleness = trainer.counters.staleness
    trainer.finish()
    ends = {**trainer.counters.as_dict(), "staleness": staleness}
    print(json.dumps({"slowest": slowest, **ends}))


def drawn_together(interval: str, lazy: str) -> None:
    """Clients that start apart and have no gradient; print where they and the center end."""
    from gluon_esgd import ElasticTrainer, world

    net = network()
    trainer = ElasticTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.0}, interval=int(interval), lazy=int(lazy)
    )
    x, y = batches()
    for i in range(STEPS):
        train_step(net, trainer, x[i % 20], y[i % 20])
        if i == 0:
            seed = float(flat(net).sum(dtype=np.float64))
            for param in net.collect_params().values():
                param.set_data(mx.nd.ones(param.shape) * (1 + world().client))
        time.sleep(PACE_S / 3)
    trainer.finish()
    own = float(flat(net).sum(dtype=np.float64))
    with trainer.center(sync=True):
        center = float(flat(net).sum(dtype=np.float64))
    seen = {"own": own, "center": center, "seed": seed, "size": flat(net).size}
    print(json.dumps({**seen, **trainer.counters.as_dict()}))


def _run(
    function: Callable, delay_s: float, interval: int, lazy: int, **settings: str
) -> List[Dict[str, Any]]:
    name = function.__name__
    call = f"from tests.training.test_lazy import {name} as f; f('{interval}', '{lazy}')"
    with servers(2, 1, delay_s=delay_s) as address:
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", call],
                cwd=ROOT,
                env=environment(
                    GLUON_ESGD_CLIENT=str(k),
                    GLUON_ESGD_NUM_CLIENTS="2",
                    GLUON_ESGD_NUM_SERVERS="1",
                    GLUON_ESGD_SCHEDULER=address,
                    **settings,
                ),
                stdout=subprocess.PIPE,
            )
            for k in range(2)
        ]
        try:
            said = [client.communicate(timeout=LIMIT_S)[0] for client in clients]
        finally:
            for client in clients:
                client.kill()
                client.communicate()
    assert [client.returncode for client in clients] == [0, 0]
    return [json.loads(text) for text in said]


@pytest.mark.servers
def test_a_slow_server_is_hidden_when_the_delay_gives_it_time() -> None:
    for client in _run(paced, DELAY_S, interval=60, lazy=59):
        assert client["exchanges"] == 3  # two due, one at the end
        assert client["exchanges_late"] == 0
        assert client["staleness"] == 59
        assert client["slowest"] < DELAY_S, "a step waited for the servers"


@pytest.mark.servers
def test_no_step_waits_for_an_exchange_that_is_late() -> None:
    settings = {"GLUON_ESGD_CENTER_WAIT_S": "0.05"}
    for client in _run(paced, DELAY_S, interval=8, lazy=1, **settings):
        assert client["exchanges_late"] > 0
        assert client["exchanges"] >= 2
        assert client["slowest"] < DELAY_S, "a step waited for the servers"
        assert client["staleness"] > 7  # applied when another one was due
        assert 0.05 < client["center_s"] < DELAY_S * client["exchanges"]


@pytest.mark.servers
def test_an_exchange_that_is_late_is_put_off_and_nothing_is_lost() -> None:
    settings = {"GLUON_ESGD_CENTER_WAIT_S": "0.02"}
    ends = _run(drawn_together, 0.2, interval=4, lazy=1, **settings)
    assert all(end["exchanges_late"] > 0 and end["exchanges"] > 1 for end in ends)
    before = ends[0]["seed"] + (1 + 2) * ends[0]["size"]
    after = ends[0]["center"] + sum(end["own"] for end in ends)
    assert after == pytest.approx(before, rel=1e-5)
