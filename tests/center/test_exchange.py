"""The rules through real servers: what is conserved, what moves, what stays."""

from __future__ import annotations

import threading
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest

from gluon_esgd.center import AVERAGED, CARRIED, MOVED, Mailbox, even_chunks
from gluon_esgd.errors import CenterError

from .servers import Job

pytestmark = pytest.mark.servers

SIZES = [1500, 1, 70, 2000]
N = sum(SIZES)
ALL_MOVED = np.full(len(SIZES), MOVED)
EPS = float(np.finfo(np.float32).eps)
CASES = [(1, 1), (2, 2), (4, 3)]  # clients, servers

GetJob = Callable[..., Job]


def attach(job: Job) -> List[Mailbox]:
    name = job.name()
    chunks = even_chunks(N, job.num_servers, largest=500)
    return job.all(lambda link: link.attach(name, SIZES, chunks, {"n": 4}), job.links)


def seeded(job: Job, seed: int = 1) -> Tuple[List[Mailbox], List[np.ndarray], np.ndarray]:
    """Return mailboxes, different weights for each client, and the center: those of the last."""
    mailboxes, random = attach(job), np.random.default_rng(seed)
    xs = [random.standard_normal(N).astype(np.float32) for _ in mailboxes]
    outs = [np.empty(N, np.float32) for _ in mailboxes]
    last = [i == len(mailboxes) - 1 for i in range(len(mailboxes))]
    for mailbox, x in zip(mailboxes, xs):
        mailbox.x[:] = x
    job.all(lambda mailbox, seeder, out: mailbox.seed(seeder, out), mailboxes, last, outs)
    assert all(out.tobytes() == xs[-1].tobytes() for out in outs)
    return mailboxes, xs, outs[0]


def exchange(mailbox: Mailbox, x: np.ndarray, rule: str, alpha: float, kinds: Any) -> np.ndarray:
    shift = np.empty(N, np.float32)
    mailbox.x[:] = x
    mailbox.start_exchange(rule, alpha, kinds)
    assert mailbox.in_flight
    assert mailbox.collect(shift, 20.0)
    assert not mailbox.in_flight
    return shift


def pulled(mailbox: Mailbox, **how: Any) -> np.ndarray:
    out = np.empty(N, np.float32)
    mailbox.pull(out, **how)
    return out


def kinds_mask(kinds: List[int], kind: int) -> np.ndarray:
    return np.repeat(np.array(kinds) == kind, SIZES)


@pytest.mark.parametrize("case", CASES)
def test_elastic_exchanges_conserve_the_sum(job: GetJob, case: Tuple[int, int]) -> None:
    mailboxes, xs, c = seeded(job(*case))
    total = np.sum(xs, axis=0, dtype=np.float64) + c

    def train(mailbox: Mailbox, x: np.ndarray) -> None:
        for _ in range(10):
            x += exchange(mailbox, x, "esgd", 0.9 / max(2, case[0]), ALL_MOVED)

    job(*case).all(train, mailboxes, xs)
    after = np.sum(xs, axis=0, dtype=np.float64) + pulled(mailboxes[0])
    assert np.abs(after - total).max() < 10 * case[0] * 16 * EPS


@pytest.mark.parametrize("case", CASES)
def test_alone_an_exchange_contracts_by_1_minus_2_alpha(job: GetJob, case: Tuple[int, int]) -> None:
    mailboxes, xs, c = seeded(job(*case), seed=2)
    alpha, x = 0.3, xs[0] + 1
    shift = exchange(mailboxes[0], x, "esgd", alpha, ALL_MOVED)
    np.testing.assert_allclose(shift, -alpha * (x - c), rtol=0, atol=8 * EPS)
    gap = (x + shift) - pulled(mailboxes[0])
    np.testing.assert_allclose(gap, (1 - 2 * alpha) * (x - c), rtol=0, atol=16 * EPS)
    assert mailboxes[0].distance == pytest.approx(np.linalg.norm(x - c), rel=1e-5)


def test_fixed_points(job: GetJob) -> None:
    (mailbox,), _, c = seeded(job(1, 1), seed=3)
    assert not exchange(mailbox, c, "esgd", 0.5, ALL_MOVED).any()  # a client at the center stays
    assert not exchange(mailbox, c + 1, "esgd", 0.0, ALL_MOVED).any()  # alpha 0 moves nothing
    assert mailbox.distance == pytest.approx(N**0.5, rel=1e-5)
    assert pulled(mailbox).tobytes() == c.tobytes()


@pytest.mark.parametrize("case", CASES)
def test_asgd_adds_each_change_once(job: GetJob, case: Tuple[int, int]) -> None:
    mailboxes, _, c0 = seeded(job(*case), seed=4)
    xs = [c0.copy() for _ in mailboxes]
    steps = np.zeros((case[0], N))

    def train(i: int) -> None:
        random = np.random.default_rng(i)
        for round_ in range(8):
            step = random.standard_normal(N).astype(np.float32)
            steps[i] += step
            xs[i] += step
            snapshot, later = xs[i].copy(), np.float32(round_)
            mailboxes[i].x[:] = snapshot
            mailboxes[i].start_exchange("asgd", 0.5, ALL_MOVED)
            xs[i] += later  # a step taken meanwhile is kept, and pushed the next time
            steps[i] += later
            shift = np.empty(N, np.float32)
            assert mailboxes[i].collect(shift, 20.0)
            xs[i] += shift
        xs[i] += exchange(mailboxes[i], xs[i], "asgd", 0.5, ALL_MOVED)

    job(*case).all(train, list(range(case[0])))
    wanted = c0 + steps.sum(axis=0)
    np.testing.assert_allclose(pulled(mailboxes[0]), wanted, rtol=0, atol=2000 * EPS * case[0])
    if case[0] == 1:
        np.testing.assert_allclose(xs[0], wanted, rtol=0, atol=2000 * EPS)


def test_changes_are_counted_from_where_the_leader_says(job: GetJob) -> None:
    (mailbox,), _, c = seeded(job(1, 1), seed=8)
    assert mailbox.base.tobytes() == c.tobytes()
    mailbox.count_from(c + 1)
    assert mailbox.base.tobytes() == (c + 1).tobytes()
    exchange(mailbox, c + 3, "asgd", 0.5, ALL_MOVED)
    np.testing.assert_allclose(pulled(mailbox), c + 2, rtol=0, atol=32 * EPS)
    mailbox.start_exchange("asgd", 0.5, ALL_MOVED)
    with pytest.raises(RuntimeError, match=r"count_from.* while an exchange is in flight"):
        mailbox.count_from(c)
    assert mailbox.collect(np.empty(N, np.float32), 20.0)


def test_a_look_at_the_center_does_not_become_the_base_of_asgd(job: GetJob) -> None:
    (one, other), _, c0 = seeded(job(2, 2), seed=5)
    exchange(other, c0 + 8, "asgd", 0.5, ALL_MOVED)
    assert (pulled(one) == c0 + 8).all()
    shift = exchange(one, c0 + 1, "asgd", 0.5, ALL_MOVED)  # else it would push 1 - 8
    np.testing.assert_allclose(pulled(other), c0 + 9, rtol=0, atol=32 * EPS)
    np.testing.assert_allclose(shift, 8, rtol=0, atol=64 * EPS)


def test_a_client_that_starts_again_from_the_center_rebases(job: GetJob) -> None:
    (one, other), _, c0 = seeded(job(2, 2), seed=6)
    exchange(other, c0 + 8, "asgd", 0.5, ALL_MOVED)
    x = pulled(one, rebase=True) + 1
    exchange(one, x, "asgd", 0.5, ALL_MOVED)
    np.testing.assert_allclose(pulled(other), c0 + 9, rtol=0, atol=32 * EPS)


@pytest.mark.parametrize("rule", ["esgd", "asgd"])
def test_kinds(job: GetJob, rule: str) -> None:
    (mailbox, other), _, c = seeded(job(2, 2), seed=7)
    kinds, alpha = [MOVED, CARRIED, AVERAGED, MOVED], 0.25
    x = c + 1
    exchange(mailbox, x, rule, alpha, np.array(kinds, np.int8))
    change = pulled(other) - c
    rate = 1.0 if rule == "asgd" else alpha
    assert (change[kinds_mask(kinds, CARRIED)] == 0).all()
    for kind, wanted in ((MOVED, rate), (AVERAGED, alpha)):
        np.testing.assert_allclose(change[kinds_mask(kinds, kind)], wanted, rtol=0, atol=32 * EPS)
    c_then = c if rule == "esgd" else pulled(other)
    gap = (x - c_then)[kinds_mask(kinds, MOVED)]
    assert mailbox.distance == pytest.approx(np.linalg.norm(gap), rel=1e-4, abs=1e-4)


def test_a_pull_in_step_shows_all_clients_the_same_version(job: GetJob) -> None:
    mailboxes, xs, _ = seeded(job(4, 3), seed=8)

    def train(mailbox: Mailbox, x: np.ndarray) -> List[bytes]:
        seen = []
        for _ in range(5):
            x += exchange(mailbox, x, "esgd", 0.2, ALL_MOVED)
            seen.append(pulled(mailbox, sync=True).tobytes())
        return seen

    seen = job(4, 3).all(train, mailboxes, xs)
    assert all(one == seen[0] for one in seen) and len(set(seen[0])) == 5


def test_the_last_center_needs_nobody(job: GetJob) -> None:
    (mailbox,) = attach(job(1, 1))
    out = np.full(N, 7, np.float32)
    assert not mailbox.last_center(out) and (out == 7).all() and mailbox.center_version == 0
    mailbox.x[:] = 2
    mailbox.seed(True, out)
    version = mailbox.center_version
    exchange(mailbox, np.full(N, 4, np.float32), "esgd", 0.5, ALL_MOVED)
    assert mailbox.center_version == version + 1
    assert mailbox.last_center(out) and (out == 2).all()  # as it was pulled, before the push
    for value in (3, 3):  # with the buffers in either state
        assert (pulled(mailbox) == value).all()
        assert mailbox.last_center(out) and (out == value).all()
    assert (exchange(mailbox, out, "esgd", 0.5, ALL_MOVED) == 0).all()


def test_a_second_seed_replaces_the_center(job: GetJob) -> None:
    mailboxes, _, c0 = seeded(job(2, 2), seed=9)
    exchange(mailboxes[0], c0 + 3, "asgd", 0.5, ALL_MOVED)
    outs = [np.empty(N, np.float32) for _ in mailboxes]
    mailboxes[0].x[:] = 5
    job(2, 2).all(lambda m, i, out: m.seed(i == 0, out), mailboxes, [0, 1], outs)
    assert outs[0].tobytes() == outs[1].tobytes()
    np.testing.assert_allclose(outs[0], 5, rtol=0, atol=32 * EPS)
    exchange(mailboxes[1], outs[1] + 1, "asgd", 0.5, ALL_MOVED)
    np.testing.assert_allclose(pulled(mailboxes[0]), 6, rtol=0, atol=32 * EPS)


def test_all_clients_learn_what_does_not_match(job: GetJob) -> None:
    three, name = job(4, 3), job(4, 3).name()
    sizes = [[4, 4], [4, 4], [4, 5], [4, 4]]
    counts = [{"num_parameters": n, "rule": 1} for n in (4, 4, 6, 4)]

    def attach_and_seed(link: Any, size: List[int], contract: Any) -> None:
        mailbox = link.attach(name, size, even_chunks(sum(size), 3), contract)
        mailbox.seed(link.client == 0, np.empty(sum(size), np.float32))

    with pytest.raises(CenterError) as caught:
        three.all(attach_and_seed, three.links, sizes, counts)
    for client, error in enumerate(caught.value.others):
        assert isinstance(error, CenterError) and f"client {client}: " in str(error)
        assert "num_parameters: client 0 has 4, client 2 has 6" in str(error)
        assert "floats: client 0 has 8, client 2 has 9" in str(error)
        assert "rule" not in str(error) and "client 1 has" not in str(error)
    seeded(three)  # the links are as good as before


def test_two_mailboxes_on_one_link(job: GetJob) -> None:
    (one,), _, c1 = seeded(job(1, 1), seed=10)
    (two,), _, c2 = seeded(job(1, 1), seed=11)
    link, before = job(1, 1).links[0], job(1, 1).links[0].bytes_moved
    shifts = [np.empty(N, np.float32) for _ in "12"]
    one.x[:], two.x[:] = c1 + 1, c2 + 2
    for mailbox in (one, two):
        mailbox.start_exchange("esgd", 0.5, ALL_MOVED)
    threads = [
        threading.Thread(target=mailbox.collect, args=(shift, 20.0))
        for mailbox, shift in ((two, shifts[1]), (one, shifts[0]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(shifts[0], -0.5, rtol=0, atol=16 * EPS)
    np.testing.assert_allclose(shifts[1], -1.0, rtol=0, atol=16 * EPS)
    assert link.bytes_moved - before == 2 * 2 * 4 * N
    two.close()
    two.close()
    assert link.bytes_moved - before == 2 * 2 * 4 * N
    np.testing.assert_allclose(pulled(one), c1 + 0.5, rtol=0, atol=16 * EPS)
    with pytest.raises(RuntimeError, match=r"pull\(\) of 'm\d+', which is closed"):
        two.pull(np.empty(N, np.float32))
    assert two.last_center(shifts[1])


def test_arguments(job: GetJob) -> None:
    (mailbox,), _, _ = seeded(job(1, 1), seed=12)
    link, out = job(1, 1).links[0], np.empty(N, np.float32)
    with pytest.raises(ValueError, match=r"name='m1' must .* not in use"):
        link.attach("m1", [1], [(0, 1)], {})
    with pytest.raises(TypeError, match="name=3 must be a str"):
        link.attach(3, [1], [(0, 1)], {})
    with pytest.raises(ValueError, match="end at 1 but sizes add up to 2"):
        link.attach("new", [2], [(0, 1)], {})
    with pytest.raises(ValueError, match="rule='sgd' must be"):
        mailbox.start_exchange("sgd", 0.5, ALL_MOVED)
    with pytest.raises(ValueError, match=r"kinds\[1\]=3 must be"):
        mailbox.start_exchange("esgd", 0.5, np.array([0, 3, 0, 0]))
    with pytest.raises(ValueError, match=r"kinds is float64 of shape \(4,\)"):
        mailbox.start_exchange("esgd", 0.5, np.zeros(4))
    with pytest.raises(ValueError, match="out is float64 of shape"):
        mailbox.pull(np.empty(N))
    with pytest.raises(TypeError, match="out must be a numpy array, not list"):
        mailbox.pull([0.0] * N)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reduce\(\) needs a link with sync=True"):
        mailbox.reduce(0, N)
    with pytest.raises(RuntimeError, match="needs an exchange in flight"):
        mailbox.collect(out, 1.0)
    mailbox.start_exchange("esgd", 0.0, ALL_MOVED)
    for call in (lambda: mailbox.pull(out), lambda: mailbox.seed(True, out),
                 lambda: mailbox.start_exchange("esgd", 0.0, ALL_MOVED)):  # fmt: skip
        with pytest.raises(RuntimeError, match="while an exchange is in flight"):
            call()
    assert mailbox.collect(out, 20.0)
