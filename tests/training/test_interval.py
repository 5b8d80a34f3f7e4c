"""An interval that is scheduled: often in the beginning, seldom later."""

from __future__ import annotations

from typing import List, Tuple

import pytest

from ..pool import Pools, Shape, label
from .problems import batches, digest, make_trainer, network, own_share, train_step


def warm_up(step: int) -> int:
    return 2 if step <= 8 else 6


def _scheduled() -> Tuple[List[int], List[str], int]:
    """Steps at which an exchange was applied, digests, and exchanges in all after finish()."""
    net = network()
    trainer = make_trainer(net, interval=warm_up, lazy=0)
    applied, digests, before = [], [], 0
    for step, (x, y) in enumerate(zip(*batches(20)), 1):
        train_step(net, trainer, own_share(x), own_share(y))
        digests.append(digest(net))
        if trainer.counters.exchanges > before:
            applied.append(step)
        before = trainer.counters.exchanges
    trainer.finish()
    return applied, digests, trainer.counters.exchanges


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, 2, 1, "esgd"), Shape(2, 2, 1, "asgd")], ids=label)
def test_exchanges_follow_the_schedule_on_all_ranks(pools: Pools, shape: Shape) -> None:
    size = shape.workers // shape.clients
    results = pools.get(shape).run(_scheduled)
    for first in range(0, shape.workers, size):
        for applied, digests, in_all in results[first : first + size]:
            assert applied == [2, 4, 6, 8, 14, 20]
            assert in_all == 7, "finish() makes one more"
            assert digests == results[first][1]
