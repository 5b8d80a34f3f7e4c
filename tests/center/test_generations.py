"""Hand-overs between generations of servers: what the center keeps, and who waits for whom."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from gluon_esgd.center import ExchangeLost
from gluon_esgd.center.generation_mailbox import GenerationMailbox
from gluon_esgd.errors import CenterError
from gluon_esgd.optim import Outer

from .supervised import LIMIT_S, Supervised, supervised

pytestmark = pytest.mark.servers

WEIGHTS, STATISTICS = 3000, 600
N = WEIGHTS + STATISTICS
KINDS = np.array([0, 1])
PARTS = (WEIGHTS, STATISTICS)
ALPHA = 0.25


def pulled(mailbox: GenerationMailbox) -> np.ndarray:
    out = np.empty(N, np.float32)
    mailbox.pull(out)
    return out


def start(mailbox: GenerationMailbox, x: np.ndarray, rule: str = "esgd") -> None:
    mailbox.x[:] = x
    assert mailbox.start_exchange(rule, ALPHA, KINDS, LIMIT_S)


def collect(mailbox: GenerationMailbox, x: np.ndarray) -> None:
    """Collect the exchange in flight and apply it to the weights in `x`."""
    shift = np.empty(N, np.float32)
    assert mailbox.collect(shift, LIMIT_S)
    x[:WEIGHTS] += shift[:WEIGHTS]


def begun(job: Supervised, rule: str = "esgd") -> List[np.ndarray]:
    """Attach and seed a vector, and let the clients part and exchange; return their weights."""
    mailboxes = job.attach(PARTS)
    random = np.random.default_rng(1)
    for mailbox in mailboxes:
        mailbox.x[:] = random.standard_normal(N) * 2.0**-4
    first = mailboxes[0].x.copy()
    xs = job.seed(mailboxes)
    assert all(x.tobytes() == first.tobytes() for x in xs)
    for x, mailbox in zip(xs, mailboxes):
        x += random.standard_normal(N).astype(np.float32)
        start(mailbox, x, rule)
        collect(mailbox, x)
    return xs


def total(xs: List[np.ndarray], center: np.ndarray) -> np.ndarray:
    return sum((x[:WEIGHTS].astype(np.float64) for x in xs), center[:WEIGHTS].astype(np.float64))


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.linalg.norm(one - other) < 1e-6 * np.linalg.norm(other))


def test_a_soft_hand_over_keeps_the_center_to_the_bit(tmp_path: Path) -> None:
    with supervised(tmp_path, 3, 2) as job:
        xs = begun(job)
        (mailboxes,) = job.mailboxes
        before = pulled(mailboxes[0])
        sum_before = total(xs, before)
        job.hand_over(source=2)
        assert pulled(mailboxes[0]).tobytes() == before.tobytes()
        for x, mailbox in zip(xs, mailboxes):  # and it moves as before
            start(mailbox, x)
            collect(mailbox, x)
        assert close(total(xs, pulled(mailboxes[1])), sum_before)
        assert job.links[0].generation == 2


if __name__ == "__main__":
    pytest.main([__file__])
