"""Rounds of rule ``sgd`` that overlap: in which order chunks travel, and that sums stay exact."""

from __future__ import annotations

import threading
from typing import Callable, List, NamedTuple, Tuple

import numpy as np
import pytest

from gluon_esgd.center import Mailbox, even_chunks, rounds_in_flight
from gluon_esgd.center.agent import Agent
from gluon_esgd.center.rounds_in_flight import RoundsInFlight
from gluon_esgd.errors import CenterError

from .servers import Job, Servers

FULL = rounds_in_flight._FLOATS_UNDER_WAY // 2  # so two are under way to a server
LIMIT_S = 20.0
GetJob = Callable[..., Job]


class Array(NamedTuple):
    """What a fake route has pushed."""

    number: int
    size: int


class Wire:
    """A route whose servers answer when the test says so; notes what happens, in order."""

    def __init__(self, sizes: List[int]) -> None:
        self.sizes, self.events = sizes, []  # type: List[int], List[Tuple[str, int]]
        self._changed = threading.Condition()
        self._let: set = set()

    def note(self, event: str, number: int) -> None:
        with self._changed:
            self.events.append((event, number))
            self._changed.notify_all()

    def let(self, what: str, *numbers: int) -> None:
        """Let pushes be acknowledged, or sums come back."""
        with self._changed:
            self._let.update((what, number) for number in numbers)
            self._changed.notify_all()

    def saw(self, *events: Tuple[str, int]) -> bool:
        """Wait for these events."""
        with self._changed:
            return self._changed.wait_for(lambda: set(events) <= set(self.events), LIMIT_S)

    def _wait(self, what: str, number: int) -> None:
        with self._changed:  # without a limit: what fails in these threads ends the process
            self._changed.wait_for(lambda: (what, number) in self._let)

    # A `Route`.

    def size(self, chunk: int) -> int:
        return self.sizes[chunk]

    def push(self, _: int, first: int, last: int) -> List[Array]:
        assert last == first + 1
        self.note("push", first)
        return [Array(first, self.sizes[first])]

    def acknowledged(self, array: Array) -> None:
        self._wait("acknowledge", array.number)

    def ask(self, _: int, first: int, last: int) -> None:
        self.note("ask", first)

    def settle(self, sent: List[Array]) -> None:
        pass

    def arrived(self, _: int, first: int, last: int) -> None:
        self._wait("return", first)


def begin(
    monkeypatch: pytest.MonkeyPatch, sizes: List[int], rounds: List[Tuple[int, int]], servers: int
) -> Tuple[Wire, RoundsInFlight]:
    """Start `rounds` of these chunks, on a thread."""
    wire, flying = Wire(sizes), RoundsInFlight(servers)
    monkeypatch.setattr(rounds_in_flight, "acknowledged", wire.acknowledged)

    def start() -> None:
        for first, last in rounds:
            flying.start(wire, first, last, lambda first=first: wire.note("answer", first))
        wire.note("started", 0)
        flying.wait()
        wire.note("over", 0)

    threading.Thread(target=start, daemon=True).start()
    return wire, flying


def test_a_chunk_is_asked_for_before_the_next_one_is_pushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire, _ = begin(monkeypatch, [FULL] * 4, [(0, 4)], servers=1)
    assert wire.saw(("push", 1))
    wire.let("acknowledge", 0)
    assert wire.saw(("push", 2))
    wire.let("acknowledge", 1, 2, 3)
    assert wire.saw(("ask", 3))
    pushes = [("push", 0), ("push", 1), ("ask", 0), ("push", 2), ("ask", 1), ("push", 3)]
    assert [event for event in wire.events if event in pushes] == pushes
    assert ("answer", 0) not in wire.events
    wire.let("return", 0, 1, 2, 3)
    assert wire.saw(("answer", 0), ("over", 0))


def test_the_place_of_a_chunk_is_free_when_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire, flying = begin(monkeypatch, [FULL] * 2, [(0, 2)], servers=1)
    assert wire.saw(("started", 0))
    taken: List[int] = []
    monkeypatch.setattr(wire, "ask", lambda *_: taken.append(flying._under_way))
    wire.let("acknowledge", 0, 1)
    wire.let("return", 0, 1)
    assert wire.saw(("over", 0))
    assert taken == [2 * FULL, FULL], "else the next push could be on the wire before it"


def test_the_next_round_begins_before_the_first_one_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire, _ = begin(monkeypatch, [FULL] * 4, [(0, 2), (2, 4)], servers=1)
    wire.let("acknowledge", 0, 1, 2, 3)
    assert wire.saw(("ask", 3), ("started", 0))
    wire.let("return", 2, 3)
    assert not {("answer", 2), ("over", 0)} & set(wire.events), "they are answered in order"
    wire.let("return", 0, 1)
    assert wire.saw(("over", 0))
    ends = [event for event in wire.events if event[0] in ("answer", "over")]
    assert ends == [("answer", 0), ("answer", 2), ("over", 0)]


@pytest.mark.parametrize(("size", "servers", "count"), [(FULL, 2, 4), (FULL // 4, 1, 8)])
def test_no_more_is_under_way_than_keeps_the_servers_busy(
    monkeypatch: pytest.MonkeyPatch, size: int, servers: int, count: int
) -> None:
    wire, _ = begin(monkeypatch, [size] * 15, [(0, 15)], servers)
    assert wire.saw(("push", count - 1))
    assert ("push", count) not in wire.events
    wire.let("acknowledge", *range(15))
    wire.let("return", *range(15))
    assert wire.saw(("over", 0))
    at = wire.events.index
    assert at(("ask", 0)) < at(("push", count)), "it was pushed before there was room"


def test_a_chunk_larger_than_the_room_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, _ = begin(monkeypatch, [4 * FULL] * 2, [(0, 1), (1, 2)], servers=1)
    wire.let("acknowledge", 0, 1)
    wire.let("return", 0, 1)
    assert wire.saw(("over", 0))
    assert wire.events.index(("ask", 0)) < wire.events.index(("push", 1))


SPANS = 6
N = SPANS * 700


def attach(job: Job) -> List[Mailbox]:
    name, chunks = job.name(), even_chunks(N, job.num_servers, largest=100)
    return job.all(lambda link: link.attach(name, [N], chunks, {}), job.links)


def spans(mailbox: Mailbox) -> List[Tuple[int, int]]:
    return [(N * i // SPANS, N * (i + 1) // SPANS) for i in range(SPANS)]


@pytest.mark.servers
@pytest.mark.parametrize(("clients", "servers"), [(2, 2), (3, 1)])
def test_many_rounds_under_way_give_exact_sums(job: GetJob, clients: int, servers: int) -> None:
    group = job(clients, servers, sync=True)
    mailboxes = attach(group)

    def train(mailbox: Mailbox, client: int) -> None:
        before = mailbox.bytes_moved
        for round_ in range(5):
            mailbox.x[:] = np.arange(N) % 97 + round_ * (client + 1)  # integers: sums are exact
            ends = [mailbox.start_reduce(*span) for span in spans(mailbox)]
            wanted = clients * (np.arange(N) % 97) + round_ * clients * (clients + 1) // 2
            for (start, stop), end in zip(spans(mailbox), ends):
                end()
                assert (mailbox.x[start:stop] == wanted[start:stop]).all(), (round_, start)
        assert mailbox.bytes_moved - before == 5 * 2 * 4 * N

    group.all(train, mailboxes, list(range(clients)))


@pytest.mark.servers
def test_a_client_starts_all_rounds_before_the_others_have_begun(job: GetJob) -> None:
    group = job(2, 2, sync=True)
    one, other = attach(group)
    one.x[:], other.x[:] = 1, 2
    ends = [one.start_reduce(*span) for span in spans(one)]
    for span in spans(other):
        other.reduce(*span)
    out = np.empty(N, np.float32)
    for end in reversed(ends):  # had in any order
        end()
    assert (one.x == 3).all() and (other.x == 3).all()
    group.all(lambda m, seeder: m.seed(seeder, out.copy()), [one, other], [True, False])


@pytest.mark.servers
def test_other_requests_wait_for_rounds_under_way(job: GetJob) -> None:
    group = job(2, 1, sync=True)
    one, other = attach(group)
    one.x[:], other.x[:] = 1, 2
    ends = [one.start_reduce(*span) for span in spans(one)]
    outs = [np.empty(N, np.float32) for _ in range(2)]
    seeding = threading.Thread(target=one.seed, args=(True, outs[0]))
    seeding.start()  # its agent has to complete the rounds first
    for span in spans(other):
        other.reduce(*span)
    assert (other.x == 3).all(), "the seed came between"
    other.seed(False, outs[1])
    seeding.join(LIMIT_S)
    for end in ends:
        end()
    assert (outs[0] == 3).all() and (outs[1] == 3).all()


@pytest.mark.servers
def test_servers_that_die_end_all_rounds_under_way(job: GetJob) -> None:
    group = Job(2, 1, sync=True, servers=Servers(2, 1), peers_limit_s=2.0)
    try:
        one, _ = attach(group)
        ends = [one.start_reduce(*span) for span in spans(one)]
        group.servers.servers[0].kill()
        for end in ends:
            with pytest.raises(CenterError, match=r"client 0: its agent .* over 2 clients"):
                end()
    finally:
        group.close()


class Vector:
    """A vector of an agent's, on a wire of the test's."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def start_reduce(
        self, rounds: RoundsInFlight, first: int, last: int, answer: Callable[[], None]
    ) -> None:
        rounds.start(self._wire, first, last, answer)  # type: ignore[arg-type]

    def fill(self) -> None:
        self._wire.note("fill", 0)


def test_an_agent_begins_the_next_round_and_nothing_else_before_one_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire, said = Wire([FULL] * 2), []  # type: Wire, List[int]
    monkeypatch.setattr(rounds_in_flight, "acknowledged", wire.acknowledged)
    agent = Agent(None, RoundsInFlight(1), lambda answer: said.append(answer["ticket"]))  # type: ignore[arg-type]
    agent._vectors["v"] = Vector(wire)  # type: ignore[assignment]

    def ask() -> None:
        for ticket in (0, 1):
            fields = {"name": "v", "first": ticket, "last": ticket + 1}
            agent.obey({"ticket": ticket, "command": "reduce", "fields": fields}, [])
        wire.note("begun", 0)
        agent.obey({"ticket": 2, "command": "fill", "fields": {"name": "v"}}, [])
        wire.note("over", 0)

    threading.Thread(target=ask, daemon=True).start()
    assert wire.saw(("push", 1), ("begun", 0))
    wire.let("acknowledge", 0, 1)
    wire.let("return", 0)
    assert wire.saw(("ask", 1))
    assert ("fill", 0) not in wire.events
    wire.let("return", 1)
    assert wire.saw(("over", 0))
    assert said == [0, 1, 2]
