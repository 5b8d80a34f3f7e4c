"""Lines, and what a station does with messages, without any process or socket."""

from __future__ import annotations

import json
import random
from typing import Any, Dict, List, Optional

import pytest

from gluon_esgd.center.dispatch import Dispatcher
from gluon_esgd.center.lines import LARGEST, Lines, encode, parse
from gluon_esgd.center.roles import Ports

Message = Dict[str, Any]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_are_the_same_however_they_arrive(size: int) -> None:
    data, lines = b"a\n\nbc\n" + b"d" * 50 + b"\nrest", Lines()
    got = [line for i in range(0, len(data), size) for line in lines.feed(data[i : i + size])]
    assert got == [b"a", b"", b"bc", b"d" * 50] and lines.feed(b"\n") == [b"rest"]
    assert lines.too_long == 0


@pytest.mark.parametrize("size", [1 << 16, LARGEST, 3 * LARGEST])
def test_a_line_that_is_too_long_is_skipped_and_takes_no_memory(size: int) -> None:
    lines, got = Lines(), []
    longest = b"y" * LARGEST
    data = b"one\n" + b"x" * (LARGEST + 1) + b"\n" + longest + b"\n" + b"z" * (2 * LARGEST)
    for i in range(0, len(data), size):
        got += lines.feed(data[i : i + size])
        assert len(lines._rest) <= LARGEST
    assert got == [b"one", longest] and lines.too_long == 2
    assert lines.feed(b"z\ntwo\n") == [b"two"] and lines.too_long == 2


def test_an_object_comes_back_and_everything_else_is_refused() -> None:
    message = {"text": "gewölbe\n\ud800", "numbers": [1, 2.5, None, True]}
    line = encode(message)
    assert line.count(b"\n") == 1 and line.isascii() and parse(line) == message
    for bad in (b"", b"[]", b"null", b"{", b"\xff", b'{"a":' * 3000, b"9" * 5000):
        with pytest.raises(ValueError, match="it is"):
            parse(bad)
    with pytest.raises(ValueError, match="over the limit"):
        encode({"x": "y" * LARGEST})
    just = {"x": "y" * (LARGEST - 9)}
    assert parse(encode(just)) == just


def test_no_port_is_given_twice() -> None:
    ports = Ports()
    given = [ports.take("127.0.0.1") for _ in range(50)]
    assert len(set(given)) == 50
    with pytest.raises(OSError, match=f"port {given[0]} was used by an earlier generation"):
        ports.take("127.0.0.1", given[0])


class FakeRoles:
    def __init__(self) -> None:
        self.calls: List[Any] = []

    def has(self, *who: Any) -> bool:
        return who in self.calls

    def scheduler(self, generation: int, host: str, port: int, terms: Message) -> None:
        self.calls += [(generation, "scheduler", 0), (host, port, terms)]

    def server(self, generation: int, index: int, address: str, terms: Message) -> None:
        self.calls += [(generation, "server", index), (address, terms)]

    def end(self, generation: int) -> None:
        self.calls.append(generation)


class FakeLeader:
    client: Optional[int] = None
    pid: Optional[int] = None

    def __init__(self) -> None:
        self.told: List[Message] = []
        self.dropped = False

    def tell(self, message: Message) -> None:
        self.told.append(message)

    def drop(self) -> None:
        self.dropped = True


class Desk:
    def __init__(self) -> None:
        self.said: List[Message] = []
        self.roles = FakeRoles()
        self.dispatcher = Dispatcher(self.said.append, self.roles)  # type: ignore[arg-type]


COUNTS = {"num_clients": 3, "num_servers": 2}
SERVE = {"do": "serve", "generation": 4, "role": "server", "index": 1, "scheduler": "h:7", **COUNTS}
HELLO = {"say": "hello", "client": 2, "pid": 9, "life": 0}


def test_the_launcher_is_obeyed() -> None:
    desk = Desk()
    more = {"role": "scheduler", "host": "h", "port": 0, "index": 5, "news": "ignored"}
    for message in ({**SERVE, **more}, SERVE, {"do": "end", "generation": 4}):
        desk.dispatcher.from_launcher(message)
    scheduler, server = [(4, "scheduler", 0), ("h", 0, COUNTS)], [(4, "server", 1), ("h:7", COUNTS)]
    assert desk.roles.calls == [*scheduler, *server, 4]
    with pytest.raises(ValueError, match="server 1 of generation 4 is there or over already"):
        desk.dispatcher.from_launcher(SERVE)


def test_a_client_that_connects_again_is_not_missed() -> None:
    desk, one, other = Desk(), FakeLeader(), FakeLeader()
    heard = {"say": "heard", "client": 2, "message": HELLO}
    for leader in (one, one):
        desk.dispatcher.from_leader(leader, HELLO)
    assert not one.dropped
    desk.dispatcher.from_leader(other, HELLO)
    assert one.dropped and not other.dropped and desk.said == [heard] * 3
    desk.dispatcher.left(one)
    desk.dispatcher.from_launcher({"do": "tell", "client": 2, "message": {"do": "go"}})
    assert other.told == [{"do": "go"}] and not one.told and len(desk.said) == 3
    desk.dispatcher.left(other)
    assert desk.said[3:] == [{"say": "gone", "client": 2, "pid": 9}]
    with pytest.raises(ValueError, match="the leader of client 2 is not connected"):
        desk.dispatcher.from_launcher({"do": "tell", "client": 2, "message": {}})
    desk.dispatcher.left(FakeLeader())  # never said who it is
    assert len(desk.said) == 4


def test_what_comes_before_a_hello_and_another_name_are_refused() -> None:
    desk, leader = Desk(), FakeLeader()
    with pytest.raises(ValueError, match="before a hello"):
        desk.dispatcher.from_leader(leader, {"say": "ready", "generation": 1})
    desk.dispatcher.from_leader(leader, HELLO)
    with pytest.raises(ValueError, match="comes from client 2 and names client 3"):
        desk.dispatcher.from_leader(leader, {**HELLO, "client": 3})
    assert len(desk.said) == 1 and leader.client == 2


VALUES = [-1, 0, 4, 10**30, True, 1.5, None, "", "x", "h:7", "h:\u00b2", "\ud800", [], {}, "server"]


def test_whatever_is_wrong_in_a_message_is_a_value_error() -> None:
    choose = random.Random(5)
    good = [(SERVE, True), ({"do": "end", "generation": 1}, True), (HELLO, False)]
    good += [({**SERVE, "role": "scheduler", "host": "h", "port": 0}, True)]
    good += [({"do": "tell", "client": 2, "message": {}}, True)]
    refused = 0
    for _ in range(3000):
        desk, leader = Desk(), FakeLeader()
        message, is_launchers = choose.choice(good)
        message = dict(message)
        for name in choose.sample(sorted(message), choose.randint(1, len(message))):
            message[name] = choose.choice(VALUES)
        message = json.loads(json.dumps(message))
        try:
            if is_launchers:
                desk.dispatcher.from_launcher(message)
            else:
                desk.dispatcher.from_leader(leader, message)
        except ValueError:
            refused += 1
            assert not desk.said and not desk.roles.calls and leader.client is None
    assert 1500 < refused < 3000
