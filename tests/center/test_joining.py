"""A further vector joins the running generation: real agents and servers, killed meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Iterator

import numpy as np
import pytest

from .shared import SharedZygote
from .supervised import LIMIT_S, Supervised, supervised
from .test_generations import PARTS, N, begin, close, collect, pulled, start, total

pytestmark = pytest.mark.servers

OTHER = (700, 0)


@pytest.fixture
def job(tmp_path: Path, zygote: SharedZygote) -> Iterator[Supervised]:
    with zygote.behind_links(), supervised(tmp_path, 2, 2) as made:
        yield made


def test_a_vector_joins_while_another_one_exchanges(job: Supervised) -> None:
    xs = begin(job)
    before, boxes = total(xs, pulled(job.mailboxes[0][0])), job.mailboxes[0]
    start(boxes[0], xs[0])  # in flight meanwhile
    others = job.attach(OTHER, joins=True)
    collect(boxes[0], xs[0])
    assert close(total(xs, pulled(boxes[1])), before)
    assert job.generation == 1
    others[0].x[:] = np.arange(700)
    seeded = job.seed(others)
    assert all(np.array_equal(x, np.arange(700)) for x in seeded)
    for client, change in ((0, 8.0), (1, 4.0)):  # alpha 1/4 of each goes to the center
        out = np.empty(700, np.float32)
        others[client].x[:] = seeded[client] + change
        assert others[client].start_exchange("esgd", 0.25, np.array([0]), LIMIT_S)
        assert others[client].collect(out, LIMIT_S)
    center = np.empty(700, np.float32)
    others[0].pull(center)
    np.testing.assert_allclose(center, np.arange(700) + 2.5)  # 8/4, then (4 - 2)/4


@pytest.mark.parametrize("victim", ["agent", "server"])
def test_what_dies_while_a_vector_joins_takes_nothing_along(job: Supervised, victim: str) -> None:
    xs = begin(job)
    before = total(xs, pulled(job.mailboxes[0][0]))
    begun = job.register(OTHER)
    job.join(0)  # its agent makes the keys, and waits for the other one's
    if victim == "agent":
        pid = job.links[1].agent_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    else:
        os.kill(job.roles["server0"]["pid"], signal.SIGKILL)
    job.hand_over(hard=True)
    others = job.attached(begun)
    assert close(total(xs, pulled(job.mailboxes[0][0])), before)
    others[0].x[:] = 3
    assert all((x == 3).all() for x in job.seed(others))


def test_an_order_of_another_generation_is_ignored(job: Supervised) -> None:
    begin(job)
    begun = job.register(OTHER)
    for k in job.clients:
        job.tell(k, "attach", generation=job.generation + 1, vector=job.vectors[-1])
    for k in job.clients:
        job.join(k)
    for k in job.clients:
        job.joined(k)
    assert [job.said(k, "joined") for k in job.clients] == [[], []]
    assert len(job.attached(begun)) == 2
    assert pulled(job.mailboxes[0][0]).size == N and PARTS[0] < N
