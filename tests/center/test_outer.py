"""Momentum of the center, on real servers: what it moves, what it leaves alone."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest

from gluon_esgd.center import Mailbox, chunks_of
from gluon_esgd.optim import Outer

from .servers import Job
from .test_exchange import exchange, pulled

pytestmark = pytest.mark.servers

OUTER = Outer(0.9, 0.7)
WEIGHTS, STATISTICS = 3000, 571
SIZES = [1000, WEIGHTS - 1000, STATISTICS]
N = sum(SIZES)
KINDS = np.array([0, 0, 1])
MOVED = np.arange(N) < WEIGHTS
ALPHA = 0.25
CASES = [(1, 1), (2, 2)]  # clients, servers

GetJob = Callable[..., Job]


def attach(job: Job) -> List[Mailbox]:
    chunks, exact = chunks_of([(WEIGHTS, False), (STATISTICS, True)], job.num_servers)
    name = job.name()
    return job.all(lambda link: link.attach(name, SIZES, chunks, {}, exact), job.links)


def seed(job: Job, mailboxes: List[Mailbox], x: np.ndarray) -> List[np.ndarray]:
    """Seed with client 0's `x`; return what each client gets."""
    outs = [np.full(N, np.nan, np.float32) for _ in mailboxes]
    for mailbox in mailboxes:
        mailbox.x[:] = x if mailbox is mailboxes[0] else 7
    job.all(lambda mailbox, i, out: mailbox.seed(i == 0, out), mailboxes, [*range(99)], outs)
    return outs


class Simulated:
    """The same center in float64."""

    def __init__(self, center: np.ndarray, outer: Outer = OUTER) -> None:
        self.c, self.v, self.outer = center.astype(np.float64), np.zeros(N), outer

    def exchange(self, rule: str, x: np.ndarray, base: np.ndarray) -> np.ndarray:
        """The shift of a client at `x`, whose weights grew from `base` (asgd)."""
        before = self.c.copy()
        start = before if rule == "esgd" else base
        d = np.where(MOVED & (rule == "asgd"), 1.0, ALPHA) * (x - start)
        self.v = self.outer.momentum * self.v + d
        outer_step = self.outer.learning_rate * (d + self.outer.momentum * self.v)
        self.c += np.where(MOVED, outer_step, d)
        return -d if rule == "esgd" else self.c - x


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.linalg.norm(one - other) < 1e-6 * np.linalg.norm(other))


@pytest.mark.parametrize("rule", ["esgd", "asgd"])
@pytest.mark.parametrize("case", CASES)
def test_exchanges_in_turn_are_those_of_the_equations(
    job: GetJob, case: Tuple[int, int], rule: str
) -> None:
    group, random = job(*case, outer=OUTER), np.random.default_rng(1)
    mailboxes = attach(group)
    start = random.standard_normal(N).astype(np.float32)
    xs = seed(group, mailboxes, start)
    assert all(x.tobytes() == start.tobytes() for x in xs)  # seeds know no momentum
    center, bases = Simulated(start), [start.astype(np.float64)] * case[0]
    for _ in range(4):
        for i, mailbox in enumerate(mailboxes):
            xs[i] += random.standard_normal(N).astype(np.float32)
            shift = exchange(mailbox, xs[i], rule, ALPHA, KINDS)
            wanted = center.exchange(rule, xs[i].astype(np.float64), bases[i])
            bases[i] = center.c.copy()
            assert close(shift, wanted)
            xs[i][MOVED] += shift[MOVED]
    assert close(pulled(mailboxes[0]), center.c)


@pytest.mark.parametrize("case", CASES)
def test_a_second_seed_is_exact_and_at_rest(job: GetJob, case: Tuple[int, int]) -> None:
    group = job(*case, outer=OUTER)
    mailboxes = attach(group)
    seed(group, mailboxes, np.ones(N))
    for _ in range(3):
        exchange(mailboxes[-1], np.full(N, 3, np.float32), "esgd", ALPHA, KINDS)
    again = np.random.default_rng(2).standard_normal(N).astype(np.float32) / 3
    assert all(out.tobytes() == again.tobytes() for out in seed(group, mailboxes, again))
    center = Simulated(again)
    x = np.full(N, 2, np.float32)
    shift = exchange(mailboxes[-1], x, "esgd", ALPHA, KINDS)  # from the center that was set
    assert close(shift, center.exchange("esgd", x, x))
    assert close(pulled(mailboxes[0]), center.c)  # the old velocity is gone


def test_a_seed_leaves_the_velocity_of_another_trainer(job: GetJob) -> None:
    group = job(2, 2, outer=OUTER)
    one, other = attach(group), attach(group)
    zeros, ones = np.zeros(N, np.float32), np.ones(N, np.float32)
    seed(group, one, zeros)
    center = Simulated(zeros)
    for _ in range(2):
        exchange(one[0], ones, "esgd", ALPHA, KINDS)
        center.exchange("esgd", ones, ones)
        seed(group, other, ones)
    assert close(pulled(one[1]), center.c)
    assert (pulled(other[1]) == 1).all()


def test_nothing_is_pushed_from_weights_that_are_lost(job: GetJob) -> None:
    group = job(1, 1, outer=OUTER)
    (mailbox,) = attach(group)
    seed(group, [mailbox], np.zeros(N, np.float32))
    exchange(mailbox, np.ones(N, np.float32), "esgd", ALPHA, KINDS)
    before, bytes_before = pulled(mailbox), mailbox.bytes_moved
    lost = np.full(N, np.nan, np.float32)
    assert not exchange(mailbox, lost, "esgd", ALPHA, KINDS).any()
    assert not np.isfinite(mailbox.distance)
    assert mailbox.bytes_moved - bytes_before == 4 * N  # a pull, and not even zeros
    assert pulled(mailbox).tobytes() == before.tobytes()  # zeros would let it coast


def test_as_many_bytes_as_without(job: GetJob) -> None:
    group = job(1, 1, outer=OUTER)
    (mailbox,) = attach(group)
    seed(group, [mailbox], np.zeros(N, np.float32))
    before = mailbox.bytes_moved
    exchange(mailbox, np.ones(N, np.float32), "asgd", ALPHA, KINDS)
    assert mailbox.bytes_moved - before == 2 * 4 * N


def test_the_fields_of_outer_are_all_that_travels(job: GetJob) -> None:
    options: Dict[str, Any] = job(1, 1, outer=OUTER).links[0].outer
    assert options == {"momentum": 0.9, "learning_rate": 0.7}
