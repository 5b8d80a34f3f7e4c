"""Rule ``sgd``: exact sums over clients, round after round."""

from __future__ import annotations

from typing import Any, Callable, List

import numpy as np
import pytest

from gluon_esgd.center import Mailbox, even_chunks
from gluon_esgd.errors import CenterError

from .servers import Job

pytestmark = pytest.mark.servers

SIZES = [900, 1200]
N = sum(SIZES)
GetJob = Callable[..., Job]


def attach(job: Job, contracts: Any = None) -> List[Mailbox]:
    name, chunks = job.name(), even_chunks(N, job.num_servers, largest=400)
    contracts = contracts or [{}] * job.num_clients
    return job.all(lambda link, c: link.attach(name, SIZES, chunks, c), job.links, contracts)


@pytest.mark.parametrize(("clients", "servers"), [(1, 1), (2, 2), (3, 1)])
def test_seed_and_sums_are_exact(job: GetJob, clients: int, servers: int) -> None:
    group = job(clients, servers, sync=True)
    mailboxes = attach(group)
    half = even_chunks(N, servers, largest=400)[1][1]

    def train(mailbox: Mailbox, client: int) -> None:
        out = np.empty(N, np.float32)
        mailbox.x[:] = 10.0 + client
        mailbox.seed(client == clients - 1, out)
        assert (out == 10.0 + clients - 1).all()
        assert (mailbox.x == 10.0 + client).all()
        before = mailbox.bytes_moved
        for round_ in range(6):
            mailbox.x[:] = np.arange(N) % 97 + round_ * (client + 1)  # integers: sums are exact
            mailbox.reduce(0, half)
            mailbox.reduce(half, N)
            weight = clients * (clients + 1) // 2
            wanted = clients * (np.arange(N) % 97) + round_ * weight
            assert (mailbox.x == wanted).all(), f"round {round_}"
        assert mailbox.bytes_moved - before == 6 * 2 * 4 * N

    group.all(train, mailboxes, list(range(clients)))


def test_sums_have_the_same_bits_on_all_clients(job: GetJob) -> None:
    group = job(3, 1, sync=True)
    mailboxes = attach(group)

    def train(mailbox: Mailbox, client: int) -> bytes:
        mailbox.x[:] = np.random.default_rng(client).standard_normal(N)
        mailbox.reduce(0, N)
        return mailbox.x.tobytes()

    assert len(set(group.all(train, mailboxes, [0, 1, 2]))) == 1


def test_contracts_are_compared(job: GetJob) -> None:
    group = job(2, 2, sync=True)
    mailboxes = attach(group, [{"n": 4}, {"n": 5}])
    outs = [np.empty(N, np.float32) for _ in mailboxes]
    with pytest.raises(CenterError) as caught:
        group.all(lambda m, i, out: m.seed(i == 0, out), mailboxes, [0, 1], outs)
    for error in caught.value.others:
        assert "n: client 0 has 4, client 1 has 5" in str(error)


def test_there_is_no_center_to_exchange_with(job: GetJob) -> None:
    (mailbox,) = attach(job(1, 1, sync=True))
    with pytest.raises(ValueError, match=r"start_exchange\(\) needs a link with sync=False"):
        mailbox.start_exchange("esgd", 0.5, np.zeros(2, int))
    with pytest.raises(ValueError, match=r"pull\(\) needs a link with sync=False"):
        mailbox.pull(np.empty(N, np.float32))
    with pytest.raises(ValueError, match="whole chunks"):
        mailbox.reduce(1, N)
