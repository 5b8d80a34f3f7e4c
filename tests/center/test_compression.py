"""Half floats to and from real servers: what is rounded, and what is not."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import numpy as np
import pytest

from gluon_esgd.center import Mailbox, chunks_of
from gluon_esgd.errors import CenterError
from gluon_esgd.optim import Outer

from .servers import Job
from .shared import SharedZygote
from .test_exchange import exchange, pulled

pytestmark = pytest.mark.servers

WEIGHTS, STATISTICS = 3000, 571
SIZES = [1000, WEIGHTS - 1000, STATISTICS]
N = sum(SIZES)
KINDS = np.array([0, 0, 1])
HALF = np.arange(N) < WEIGHTS
ALPHA = 0.25
EPS = float(np.finfo(np.float32).eps)
CASES = [(1, 1), (2, 2), (2, 1)]  # clients, servers

GetJob = Callable[..., Job]


def attach(job: Job, contracts: Any = None) -> List[Mailbox]:
    chunks, exact = chunks_of([(WEIGHTS, False), (STATISTICS, True)], job.num_servers)
    name, contracts = job.name(), contracts or [{}] * job.num_clients
    return job.all(
        lambda link, contract: link.attach(name, SIZES, chunks, contract, exact),
        job.links, contracts,
    )  # fmt: skip


def seed(job: Job, mailboxes: List[Mailbox], x: Any) -> List[np.ndarray]:
    outs = [np.full(N, np.nan, np.float32) for _ in mailboxes]
    for mailbox in mailboxes:
        mailbox.x[:] = x if mailbox is mailboxes[0] else 7
    job.all(lambda mailbox, i, out: mailbox.seed(i == 0, out), mailboxes, [*range(99)], outs)
    return outs


def rounded(x: np.ndarray) -> np.ndarray:
    """What is left of a vector after a way in half floats."""
    return np.where(HALF, x.astype(np.float16).astype(np.float32), x.astype(np.float32))


def normal(seed_: int) -> np.ndarray:
    return np.random.default_rng(seed_).standard_normal(N).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_seeds_and_looks_are_exact(job: GetJob, case: Tuple[int, int]) -> None:
    group = job(*case, compression="fp16")
    mailboxes = attach(group)
    first = normal(1)
    first[:4] = 1e5, 1e-9, 1 + EPS, -3e38  # nothing that half floats could hold
    assert all(out.tobytes() == first.tobytes() for out in seed(group, mailboxes, first))
    second = normal(2)
    assert all(out.tobytes() == second.tobytes() for out in seed(group, mailboxes, second))
    assert all(pulled(mailbox).tobytes() == second.tobytes() for mailbox in mailboxes)
    # and an exchange starts from there
    shift = exchange(mailboxes[-1], second, "esgd", ALPHA, KINDS)
    np.testing.assert_array_equal(shift, -rounded(np.float32(ALPHA) * (second - rounded(second))))


@pytest.mark.parametrize("case", CASES)
def test_elastic_exchanges_conserve_the_sum(job: GetJob, case: Tuple[int, int]) -> None:
    group = job(*case, compression="fp16")
    mailboxes, xs = attach(group), [normal(10 + i) for i in range(case[0])]
    c = seed(group, mailboxes, normal(9))[0]
    total = np.sum(xs, axis=0, dtype=np.float64) + c

    def train(mailbox: Mailbox, x: np.ndarray) -> None:
        for _ in range(10):
            x += exchange(mailbox, x, "esgd", ALPHA, KINDS)

    group.all(train, mailboxes, xs)
    after = np.sum(xs, axis=0, dtype=np.float64) + pulled(mailboxes[0])
    assert np.abs(after - total).max() < 10 * case[0] * 16 * EPS  # as in float32
    if case[0] == 1:  # the client is as near to the center as half floats let it come
        gap = (xs[0] - pulled(mailboxes[0]))[HALF]
        assert np.linalg.norm(gap) < 2e-3 * np.linalg.norm(c[HALF])


def test_both_sides_take_the_same_rounded_difference(job: GetJob) -> None:
    group = job(2, 2, compression="fp16")
    mailboxes, x = attach(group), normal(3)
    c = seed(group, mailboxes, normal(4))[0]
    shift = exchange(mailboxes[0], x, "esgd", ALPHA, KINDS)
    d = rounded(np.float32(ALPHA) * (x - rounded(c)))
    np.testing.assert_array_equal(shift, -d)
    np.testing.assert_array_equal(pulled(mailboxes[1]), c + d)


def test_changes_add_up_in_float32(job: GetJob) -> None:
    group = job(1, 2, compression="fp16")
    (mailbox,) = attach(group)
    x = seed(group, [mailbox], np.ones(N))[0]
    tiny = np.float32(2.0**-14)  # sixteen of them are one step of half floats at 1
    for n in range(1, 17):
        x += tiny
        shift = exchange(mailbox, x, "asgd", 1.0, KINDS)
        assert (pulled(mailbox) == 1 + n * tiny).all()
        np.testing.assert_array_equal(shift, rounded(1 + n * tiny * np.ones(N)) - x)
        x += shift


def test_the_error_of_an_exchange(job: GetJob) -> None:
    group = job(1, 1, compression="fp16")
    (mailbox,) = attach(group)
    c, x = seed(group, [mailbox], normal(5))[0], normal(6)
    shift = exchange(mailbox, x, "esgd", ALPHA, KINDS)
    exact = -ALPHA * (x - c)
    error = np.linalg.norm((shift - exact)[HALF]) / np.linalg.norm(exact[HALF])
    assert 5e-5 < error < 4e-4  # docs/algorithms.md says 2e-4
    np.testing.assert_allclose(shift[~HALF], exact[~HALF], rtol=0, atol=4 * EPS)


@pytest.mark.parametrize("rule", ["esgd", "asgd"])
def test_half_the_bytes(job: GetJob, rule: str) -> None:
    group = job(1, 1, compression="fp16")
    (mailbox,) = attach(group)
    seed(group, [mailbox], normal(7))
    before = mailbox.bytes_moved
    exchange(mailbox, normal(8), rule, ALPHA, KINDS)
    assert mailbox.bytes_moved - before == 2 * (2 * WEIGHTS + 4 * STATISTICS)
    pulled(mailbox)
    assert mailbox.bytes_moved - before == 2 * (2 * WEIGHTS + 4 * STATISTICS) + 4 * N


@pytest.mark.parametrize("rule", ["esgd", "asgd"])
@pytest.mark.parametrize("value", [2.0**19, np.inf, np.nan])
def test_a_difference_that_half_floats_lack_moves_nothing(
    job: GetJob, rule: str, value: float
) -> None:
    group = job(2, 2, compression="fp16")
    mailboxes = attach(group)
    c = seed(group, mailboxes, normal(11))[0]
    x = c.copy()
    x[5] = value
    shift = exchange(mailboxes[0], x, rule, ALPHA, KINDS)
    assert not np.isfinite(mailboxes[0].distance)  # which the client says
    assert pulled(mailboxes[1]).tobytes() == c.tobytes()
    if rule == "esgd":
        assert not shift.any()
    exchange(mailboxes[0], c + 1, rule, ALPHA, KINDS)
    assert np.isfinite(mailboxes[0].distance)
    assert np.isfinite(pulled(mailboxes[1])).all()


@pytest.mark.parametrize("rule", ["esgd", "asgd"])
def test_a_center_that_half_floats_lack_is_fetched_in_float32(job: GetJob, rule: str) -> None:
    group = job(2, 2, compression="fp16")
    mailboxes, large = attach(group), normal(12)
    large[7] = 1e6
    c, before = seed(group, mailboxes, large)[0], mailboxes[0].bytes_moved
    x = c.copy()
    x[:9] += 1
    shift = exchange(mailboxes[0], x, rule, ALPHA, KINDS)
    d = rounded(np.float32(1.0 if rule == "asgd" else ALPHA) * (x - c))
    after = pulled(mailboxes[1])
    np.testing.assert_array_equal(after, c + d)
    np.testing.assert_array_equal(shift, -d if rule == "esgd" else after - x)
    half = 2 * WEIGHTS + 4 * STATISTICS
    assert mailboxes[0].bytes_moved - before == 2 * half + 4 * N


def test_momentum_and_half_floats_together(job: GetJob) -> None:
    group = job(2, 2, compression="fp16", outer=Outer(0.5, 2.0))
    mailboxes = attach(group)
    c = seed(group, mailboxes, np.zeros(N))[0].astype(np.float64)
    v = np.zeros(N)
    for n in range(4):
        x = (c + n - 1.5).astype(np.float32)
        exchange(mailboxes[n % 2], x, "esgd", ALPHA, KINDS)
        d = rounded(np.float32(ALPHA) * (x - rounded(c)))
        v = 0.5 * v + d
        c += np.where(HALF, 2 * (d + 0.5 * v), d)
        np.testing.assert_allclose(pulled(mailboxes[0]), c, rtol=1e-6, atol=1e-6)


def test_clients_with_other_settings_learn_of_it(zygote: SharedZygote) -> None:
    options: List[Optional[str]] = ["fp16", None]
    each = [{"compression": o} for o in options]
    group = zygote.job(2, 1, limit_s=20.0, start_timeout_s=60.0, each=each)
    try:
        contracts = [{"compression": int(o is not None)} for o in options]
        mailboxes = attach(group, contracts)
        with pytest.raises(CenterError) as caught:
            seed(group, mailboxes, np.ones(N))
        for error in caught.value.others:
            assert "compression: client 0 has 1, client 1 has 0" in str(error)
    finally:
        group.close()


def test_sizes_of_arguments(job: GetJob) -> None:
    link = job(1, 1, compression="fp16").links[0]
    with pytest.raises(ValueError, match="exact has 2 entries for 1 chunks"):
        link.attach("odd", [2], [(0, 2)], {}, [True, False])


# Rule sgd.


@pytest.mark.parametrize("case", [(2, 1), (2, 2)])
def test_rounds_sum_in_float32_and_tails_are_exact(job: GetJob, case: Tuple[int, int]) -> None:
    group = job(*case, sync=True, compression="fp16")
    mailboxes = attach(group)

    def train(mailbox: Mailbox, client: int) -> np.ndarray:
        before = mailbox.bytes_moved
        for round_ in range(3):
            mailbox.x[:] = 2047 if client else 1 + round_  # exact in half floats; the sum is not
            mailbox.x[WEIGHTS:] = (1 << 23) - client
            mailbox.reduce(0, N)
            wanted = np.full(N, 2048.0 + round_)
            wanted[WEIGHTS:] = (1 << 24) - 1
            np.testing.assert_array_equal(mailbox.x, rounded(wanted))
        assert mailbox.bytes_moved - before == 3 * 2 * (2 * WEIGHTS + 4 * STATISTICS)
        mailbox.x[:] = normal(20 + client)
        mailbox.reduce(0, WEIGHTS)
        return mailbox.x[:WEIGHTS].copy()

    one, other = group.all(train, mailboxes, [0, 1])
    assert one.tobytes() == other.tobytes()
    halves = rounded(normal(20))[:WEIGHTS] + rounded(normal(21))[:WEIGHTS]
    np.testing.assert_array_equal(one, rounded(np.resize(halves, N))[:WEIGHTS])


def test_weights_of_rule_sgd_are_seeded_exactly(job: GetJob) -> None:
    group = job(2, 2, sync=True, compression="fp16")
    name = group.name()
    chunks, exact = chunks_of([(WEIGHTS, True), (STATISTICS, True)], 2)
    mailboxes = group.all(lambda link: link.attach(name, SIZES, chunks, {}, exact), group.links)
    x = normal(30)
    assert all(out.tobytes() == x.tobytes() for out in seed(group, mailboxes, x))


def test_gradients_that_overflow_do_so_on_all_clients(job: GetJob) -> None:
    group = job(2, 2, sync=True, compression="fp16")
    mailboxes = attach(group)

    def train(mailbox: Mailbox, client: int) -> np.ndarray:
        mailbox.x[:] = 0
        mailbox.x[3] = 40000  # fits, the sum does not
        mailbox.x[4] = 1e6 * client
        mailbox.reduce(0, N)
        first = mailbox.x.copy()
        mailbox.x[:] = 1
        mailbox.reduce(0, N)
        assert (mailbox.x == 2).all()
        return first

    for x in group.all(train, mailboxes, [0, 1]):
        assert np.isinf(x[3:5]).all() and np.isfinite(np.delete(x, [3, 4])).all()
