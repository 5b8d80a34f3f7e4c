"""A client that has made its steps ends, and nobody waits for it: the center is the servers'."""

from __future__ import annotations

import os
import re
import time
from typing import Any, Callable

import numpy as np
import pytest

from ..pool import Shape, run_once
from .problems import batches, flat, make_trainer, network, train_step

LIMIT_S = 60.0


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end, "the client that leaves did not end"
        time.sleep(0.05)


def _alive(path: str) -> bool:
    """Whether the process lives whose number is in the file `path`."""
    with open(path) as file:
        return os.path.exists(f"/proc/{file.read()}")


def _center(net: Any, trainer: Any) -> np.ndarray:
    with trainer.center():
        return flat(net)


def leaves_after_a_third() -> None:
    """Client 1 ends after 10 of 30 steps; client 0 sees it end, and goes on."""
    from gluon_esgd import world

    me, net = world(), network()
    trainer = make_trainer(net, interval=1)
    path = os.path.join(str(me.settings.job_dir), "pid")
    x, y = batches()
    for i in range(30):
        if i == 10 and me.client == 1:
            trainer.finish()
            with open(path + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(path + ".new", path)
            return
        if i == 10:
            _until(lambda: os.path.exists(path))
            _until(lambda: not _alive(path))
            left = _center(net, trainer)
        train_step(net, trainer, x[i % 20], y[i % 20])
    center = _center(net, trainer)
    trainer.finish()
    moved, apart = (float(np.abs(center - other).max()) for other in (left, flat(net)))
    said = f"{trainer.counters.exchanges} exchanges, moved {moved:.4f}, {apart:.4f} apart"
    print(f"went on: {said}\n", flush=True)


@pytest.mark.servers
@pytest.mark.parametrize("rule", ["esgd", "asgd"])
def test_a_client_that_ends_early_is_not_waited_for(rule: str) -> None:
    ended = run_once(Shape(2, 2, 1, rule), leaves_after_a_third, timeout=110)
    assert ended.code == 0, ended.output
    pattern = r"went on: (\d+) exchanges, moved ([\d.]+), ([\d.]+) apart"
    ((exchanges, moved, apart),) = re.findall(pattern, ended.output)
    assert int(exchanges) == 31, "each that was due, and the last one"
    assert float(moved) > 0.01 and float(apart) < 1, "the client alone moves the center now"
