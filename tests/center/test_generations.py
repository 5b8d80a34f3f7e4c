"""Hand-overs between generations of servers: what the center keeps, and who waits for whom."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import numpy as np
import pytest

from gluon_esgd.center import ExchangeLost
from gluon_esgd.center.generation_mailbox import GenerationMailbox
from gluon_esgd.center.memory import ACKNOWLEDGED, PULLING
from gluon_esgd.errors import CenterError
from gluon_esgd.optim import Outer

from .shared import SharedZygote
from .supervised import LIMIT_S, Supervised, supervised
from .test_faults import ended, until

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


def collect(mailbox: GenerationMailbox, x: np.ndarray) -> np.ndarray:
    """Collect the exchange in flight, apply it to the weights in `x`, and return the shift."""
    shift = np.empty(N, np.float32)
    assert mailbox.collect(shift, LIMIT_S)
    x[:WEIGHTS] += shift[:WEIGHTS]
    return shift


def begin(job: Supervised, rule: str = "esgd") -> List[np.ndarray]:
    """Attach and seed a vector, and let the clients part and exchange; return their weights."""
    mailboxes = job.attach(PARTS)
    random = np.random.default_rng(1)
    for mailbox in mailboxes:
        mailbox.x[:] = random.standard_normal(N)
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


class Plain:
    """Three clients under `esgd` and two servers, which all tests here have damaged in turn."""

    def __init__(self, job: Supervised) -> None:
        self.job = job
        self.xs = begin(job)

    @property
    def boxes(self) -> List[GenerationMailbox]:
        return self.job.mailboxes[0]

    def total(self) -> np.ndarray:
        return total(self.xs, pulled(self.boxes[0]))

    def exchange(self, client: int) -> np.ndarray:
        start(self.boxes[client], self.xs[client])
        return collect(self.boxes[client], self.xs[client])

    def kill(self, role: str, with_signal: int = signal.SIGKILL) -> None:
        os.kill(self.job.roles[role]["pid"], with_signal)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any) -> Iterator[Plain]:
    with supervised(tmp_path_factory.mktemp("job"), 3, 2) as job:
        yield Plain(job)


def test_a_soft_hand_over_keeps_the_center_to_the_bit(plain: Plain) -> None:
    before, sum_before = pulled(plain.boxes[0]), plain.total()
    plain.kill("scheduler")
    plain.job.hand_over(source=2)
    assert pulled(plain.boxes[0]).tobytes() == before.tobytes()
    for k in range(3):  # and it moves as before
        plain.exchange(k)
    assert close(plain.total(), sum_before)


def test_a_hard_hand_over_keeps_the_freshest_center_and_its_leaders_own_difference(
    plain: Plain,
) -> None:
    job, sum_before = plain.job, total(plain.xs, pulled(plain.boxes[1]))
    time.sleep(0.1)  # leaders tell their ages some milliseconds apart
    shift, center = plain.exchange(1), np.empty(N, np.float32)
    assert plain.boxes[1].last_center(center)
    plain.kill("server1")
    job.station.heard.say("ended", role="server", index=1)
    old = job.generation
    job.hold(old, hard=True)
    fresh = job.held(old)
    assert min(fresh, key=fresh.__getitem__) == 1
    assert not plain.boxes[0].start_exchange("esgd", ALPHA, KINDS)
    job.prepare()
    job.ready()
    job.restore(1)
    job.go()
    assert pulled(plain.boxes[0]).tobytes() == (center - shift).tobytes()
    assert close(plain.total(), sum_before)  # nobody else had exchanged since


def test_an_exchange_that_is_back_but_not_collected_keeps_its_shift(plain: Plain) -> None:
    sum_before = plain.total()
    for source in (0, 1):  # whose buffers the saved center overwrites, or not
        start(plain.boxes[0], plain.xs[0])
        memory = plain.boxes[0]._memory
        until(lambda memory=memory: memory.stage[1] == ACKNOWLEDGED, LIMIT_S)
        plain.job.hand_over(source=source)
        plain.exchange(1)
        collect(plain.boxes[0], plain.xs[0])
        assert close(plain.total(), sum_before)


def test_a_soft_hold_waits_for_what_is_in_flight(plain: Plain) -> None:
    job, sum_before = plain.job, plain.total()
    old = job.generation
    plain.kill("server0", signal.SIGSTOP)
    start(plain.boxes[2], plain.xs[2])
    job.prepare()
    job.ready()
    job.hold(old)
    job.held(old, [0, 1])
    assert not plain.boxes[0].start_exchange("esgd", ALPHA, KINDS)  # training does not wait
    assert not job.said(2, "held")
    plain.kill("server0", signal.SIGCONT)
    job.held(old, [2])
    assert job.save(old, 0)
    job.restore(0)
    job.go()
    collect(plain.boxes[2], plain.xs[2])
    assert close(plain.total(), sum_before)


def test_an_agent_killed_in_an_exchange_costs_one_difference_at_most(plain: Plain) -> None:
    job, random, sum_before = plain.job, np.random.default_rng(3), plain.total()
    for kill in range(4):
        plain.xs[1] += random.standard_normal(N).astype(np.float32)
        sum_before = plain.total()
        agent = job.links[1].agent_pid
        start(plain.boxes[1], plain.xs[1])
        time.sleep(random.random() * 0.004 * kill)
        os.kill(agent, signal.SIGKILL)
        assert not job.hear(1, "lost", generation=job.generation)["stall"]
        arrived: Any = np.zeros(N)
        serial, stage = plain.boxes[1]._memory.stage
        try:
            collect(plain.boxes[1], plain.xs[1])
        except ExchangeLost as error:
            assert "lost with generation" in str(error)
            assert (serial, stage) != (plain.boxes[1]._serial, ACKNOWLEDGED)
            center = np.empty(N, np.float32)
            plain.boxes[1].last_center(center)
            arrived = ALPHA * (plain.xs[1] - center) if stage > PULLING else arrived
        job.hand_over()  # the old servers still answer
        missing = plain.total() - sum_before
        assert (np.abs(missing) < np.abs(arrived[:WEIGHTS]) * 1.001 + 1e-4).all()


def test_an_agent_killed_before_it_pushed_costs_nothing(plain: Plain) -> None:
    sum_before, before = plain.total(), plain.xs[1].tobytes()
    plain.kill("server0", signal.SIGSTOP)
    start(plain.boxes[1], plain.xs[1])
    until(lambda: plain.boxes[1]._memory.stage[1] == PULLING, LIMIT_S)
    os.kill(plain.job.links[1].agent_pid, signal.SIGKILL)
    with pytest.raises(ExchangeLost, match="client 1: an exchange of 'm0' was lost with gener"):
        collect(plain.boxes[1], plain.xs[1])
    assert plain.xs[1].tobytes() == before and not plain.boxes[1].in_flight
    plain.kill("server0", signal.SIGCONT)
    plain.job.hand_over()
    assert close(plain.total(), sum_before)


def test_a_server_that_stands_still_is_a_stall(plain: Plain) -> None:
    job = plain.job
    sum_before = plain.total()
    plain.kill("server0", signal.SIGSTOP)
    start(plain.boxes[0], plain.xs[0])
    agent = job.links[0].agent_pid
    assert job.hear(0, "lost", generation=job.generation)["stall"]
    until(lambda: ended(agent), LIMIT_S)
    with pytest.raises(ExchangeLost):
        collect(plain.boxes[0], plain.xs[0])
    job.hand_over(hard=True, source=0)
    assert close(plain.total(), sum_before)


def test_after_its_zygote_a_leader_makes_another(plain: Plain) -> None:
    link, before = plain.job.links[1], pulled(plain.boxes[1])
    zygote = link.zygote_pid
    os.kill(zygote, signal.SIGKILL)
    link._zygote.process.wait()
    plain.exchange(0)
    before = pulled(plain.boxes[1])  # its agent goes on
    plain.job.hand_over(source=1)
    assert link.zygote_pid != zygote
    assert pulled(plain.boxes[1]).tobytes() == before.tobytes()


def test_what_a_zygote_says_is_read_or_it_would_block_some_day(plain: Plain) -> None:
    link, members = plain.job.links[0], {"client": 0, "num_clients": 1, "num_servers": 1}
    for tag in range(1000, 1040):
        link._next_agent(tag, "127.0.0.1:9", secret="", **members).close()
    for _ in range(2):  # the first one waits until the zygote has done all that
        plain.job.hand_over()
    assert len(link._zygote.news()[0]) < 20


def test_a_hand_over_that_is_begun_again_keeps_the_center(plain: Plain) -> None:
    job, before = plain.job, pulled(plain.boxes[0])
    old = job.generation
    job.prepare()
    job.ready()
    job.hold(old)
    job.held(old)
    assert job.save(old, 0)
    job.restore(0)
    for role in job.coming.values():  # and now the new one is lost
        os.kill(role["pid"], signal.SIGKILL)
    job.hold(old, hard=True)
    job.held(old)
    job.prepare()
    job.ready()
    job.restore(1)
    job.go()
    after = pulled(plain.boxes[2])
    assert close(after, before)


def test_meeting_gives_all_the_same_center(plain: Plain) -> None:
    job, outs = plain.job, [np.empty(N, np.float32) for _ in range(3)]
    begun = job.at_once(lambda box, out: box.pull(out, sync=True), plain.boxes, outs)
    for what in ("the pull of 'm0'", "the end of the pull of 'm0'"):
        for k in job.clients:
            job.hear(k, "meet", what=what)
        assert not any(future.done() for future in begun)
        for k in job.clients:
            job.tell(k, "met", what=what)
    for future in begun:
        future.result(LIMIT_S)
    assert len({out.tobytes() for out in outs}) == 1


def test_a_client_that_comes_back_moves_nothing_and_a_wrong_one_is_refused(plain: Plain) -> None:
    job, before = plain.job, pulled(plain.boxes[1])
    job.links[0].close()
    job.hear(0, "finished")
    link = job.add(0, 3, life=1)
    wrong = job.threads.submit(link.attach, "m0", [N + 1], [(0, N + 1)], {"parameters": 4})
    assert job.hear(0, "register")["vector"]["contract"]["floats"] == N + 1
    job.tell(0, "refuse", name="m0", why="the clients do not match: parameters")
    with pytest.raises(CenterError, match="the clients do not match: parameters"):
        wrong.result(LIMIT_S)
    job.links[0].close()
    link = job.add(0, 3, life=2)
    vector = job.vectors[0]
    layout = vector["sizes"], vector["chunks"], {}, vector["exact"]
    job.hand_over(source=1)  # it has not attached the vector, which its agent does for it
    attaching = job.threads.submit(link.attach, "m0", *layout)
    assert job.hear(0, "register")["vector"] == vector
    job.tell(0, "attached", name="m0")
    box = job.mailboxes[0][0] = attaching.result(LIMIT_S)
    out = np.empty(N, np.float32)
    box.x[:] = 99
    joining = job.threads.submit(box.seed, True, out)
    job.hear(0, "offer", name="m0", again=False)
    job.tell(0, "filled", name="m0", joined=True)
    assert joining.result(LIMIT_S) is True
    assert out.tobytes() == before.tobytes() == pulled(box).tobytes()
    plain.xs[0] = out
    plain.exchange(0)


def test_new_vectors_come_with_a_generation_and_alpha_follows_the_clients(plain: Plain) -> None:
    job, before = plain.job, pulled(plain.boxes[0])
    others = job.attach(PARTS)
    assert pulled(plain.boxes[0]).tobytes() == before.tobytes()
    others[0].x[:] = 5
    assert all((out == 5).all() for out in job.seed(others))
    others[0].x[:] = 1 / 3
    assert all((out == np.float32(1 / 3)).all() for out in job.seed(others, again=True))
    job.prepare()
    job.ready()
    job.hold(job.generation - 1)
    job.held(job.generation - 1)
    assert job.save(job.generation - 1, 2)
    job.restore(2)
    job.go(num_clients=7)
    assert pulled(plain.boxes[1]).tobytes() == before.tobytes()
    until(lambda: [link.num_clients for link in job.links] == [7] * 3, LIMIT_S)
    assert (pulled(others[1]) == np.float32(1 / 3)).all()


WRONG: List[Callable[[Supervised], None]] = [
    lambda job: job.tell(0, "nothing"),
    lambda job: job.tell(0, "hold", generation="1", hard=False),
    lambda job: job.tell(0, "hold", generation=job.generation + 1, hard=True),
    lambda job: job.tell(0, "prepare", generation=10**6),
    lambda job: job.tell(0, "prepare", generation=10**6, client=0, num_clients=1, num_servers=1,
                         scheduler="x:1", vectors=[{"name": "m0", "sizes": [0]}]),
    lambda job: job.tell(0, "seed", generation=1, names=["m0"]),
    lambda job: job.tell(0, "go", generation=1, num_clients=1, place=0),
    lambda job: job.tell(0, "save", generation=job.generation),
    lambda job: job.tell(0, "filled", name="m0"),
    lambda job: job.tell(0, "met", what=["m0"]),
]  # fmt: skip


def test_orders_that_are_none_change_nothing(plain: Plain, caplog: Any) -> None:
    sum_before = plain.total()
    for wrong in WRONG:
        wrong(plain.job)
    plain.job.hand_over()
    plain.exchange(0)
    assert close(plain.total(), sum_before)
    assert "an order of the launcher was dropped: 'nothing'" in caplog.text


def test_a_forked_child_cannot_use_the_link(plain: Plain) -> None:
    child = os.fork()
    if not child:
        try:
            plain.boxes[0].start_exchange("esgd", ALPHA, KINDS)
        except CenterError:
            os._exit(plain.job.links[0]._control._station._sock.fileno() == -1)
        os._exit(7)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 1
    plain.exchange(0)


def test_a_station_that_was_lost_is_found_again(plain: Plain) -> None:
    job = plain.job
    shift, center = plain.exchange(2), np.empty(N, np.float32)
    assert plain.boxes[2].last_center(center)
    job.new_station()
    for k in job.clients:
        job.hear(k, "hello", client=k)
        assert [job.hear(k, "register")["vector"]["name"] for _ in "ab"] == ["m0", "m1"]
    job.hand_over(hard=True, source=2)
    assert pulled(plain.boxes[0]).tobytes() == (center - shift).tobytes()


def test_without_a_launcher_exchanges_fail_in_time(tmp_path: Path, zygote: SharedZygote) -> None:
    with zygote.behind_links(), supervised(tmp_path, 1, limit_s=0.5) as job:
        (x,) = begin(job)
        ((box,),) = job.mailboxes
        job.station.kill()
        until(lambda: job.links[0]._control.state.failure is not None, LIMIT_S)
        with pytest.raises(CenterError, match=r"client 0: the station .* has lost its launcher"):
            box.start_exchange("esgd", ALPHA, KINDS)
        assert box.last_center(x)


VARIANTS = [
    ("asgd", {}),
    ("esgd", {"outer": Outer(0.9, 0.5)}),
    ("esgd", {"compression": "fp16"}),
]


@pytest.mark.parametrize(("rule", "terms"), VARIANTS)
def test_other_rules_are_handed_over_too(
    tmp_path: Path, zygote: SharedZygote, rule: str, terms: Any
) -> None:
    with zygote.behind_links(), supervised(tmp_path, 2, **terms) as job:
        xs = begin(job, rule)
        one, other = job.mailboxes[0]
        before = pulled(one)
        job.hand_over()
        assert pulled(one).tobytes() == before.tobytes()
        center, own = np.empty(N, np.float32), xs[1].copy()
        start(other, xs[1], rule)  # from the center that was handed over
        shift = collect(other, xs[1])
        if rule == "esgd":
            sent = before.astype(np.float16) if terms.get("compression") else before
            assert np.abs(shift + ALPHA * (own - sent)).max() < 4e-3 * np.abs(shift).max()
        else:
            assert close(pulled(one)[:WEIGHTS], xs[1][:WEIGHTS])
        assert other.last_center(center)
        adds = rule == "esgd" and "outer" not in terms
        job.hand_over(hard=True, source=1)
        assert pulled(one).tobytes() == (center - shift if adds else center).tobytes()


def test_sums_go_on_under_rule_sgd_and_a_lost_agent_is_an_error(
    tmp_path: Path, zygote: SharedZygote
) -> None:
    with zygote.behind_links(), supervised(tmp_path, 2, sync=True) as job:
        boxes, outs = job.attach(PARTS), [np.empty(N, np.float32) for _ in range(2)]
        for k, box in enumerate(boxes):
            box.x[:] = 1 + k
        seeding = job.at_once(lambda box, k, out: box.seed(k == 0, out), boxes, job.clients, outs)
        assert [future.result(LIMIT_S) for future in seeding] == [False] * 2
        assert all((out == 1).all() for out in outs)
        grads = job.attach(PARTS)
        for box in grads:
            box.x[:] = 2
        for future in job.at_once(lambda box: box.reduce(0, N), grads):
            future.result(LIMIT_S)
        assert all((box.x == 4).all() for box in grads)
        reducing = job.threads.submit(grads[0].reduce, 0, N)
        until(lambda: not job.links[0]._control.state.current.idle, LIMIT_S)
        os.kill(job.links[0].agent_pid, signal.SIGKILL)
        with pytest.raises(CenterError, match="client 0: its agent was lost during the sum of 'm1"):
            reducing.result(LIMIT_S)
        job.hear(0, "lost", generation=2)


def test_a_center_on_disk_goes_before_weights_but_not_before_one_that_was_saved(
    tmp_path: Path, zygote: SharedZygote
) -> None:
    with zygote.behind_links(), supervised(tmp_path, 2, snapshot_s=0.01) as job:
        mailboxes = job.attach(PARTS)
        mailboxes[0].x[:], mailboxes[1].x[:] = 1, 2
        job.seed(mailboxes)
        start(mailboxes[0], np.full(N, 3, np.float32))
        collect(mailboxes[0], np.zeros(N, np.float32))
        left = pulled(mailboxes[0])
    (path,) = (tmp_path / "checkpoints" / "center").iterdir()  # written by those who leave
    assert np.load(path).tobytes() == left.tobytes()
    for resumed in (False, True):
        folder = tmp_path / str(resumed)
        with zygote.behind_links(), supervised(folder, 2, snapshot_s=1000.0) as job:
            (folder / "checkpoints").symlink_to(tmp_path / "checkpoints")
            mailboxes = job.attach(PARTS)
            mailboxes[0].x[:] = mailboxes[1].x[:] = 5
            outs = job.seed(mailboxes, resumed=resumed)
            wanted = np.full(N, 5, np.float32) if resumed else left
            assert all(out.tobytes() == wanted.tobytes() for out in outs)
