"""What launcher, leaders and strangers may send to a station, and commands to a server."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

from gluon_esgd.center.dispatch import Dispatcher
from gluon_esgd.center.lines import LARGEST, Lines, encode, parse
from gluon_esgd.center.roles import Ports, Roles
from gluon_esgd.center.rule import encode as encode_outer
from gluon_esgd.center.secret import sign
from gluon_esgd.center.server import Controller, Terms
from gluon_esgd.optim import Outer

from .mutation import Cases, bytes_, json_text, seeds

LAUNCHER = [
    {"do": "serve", "generation": 2, "role": "scheduler", "index": 0, "host": "127.0.0.1",
     "port": 0, "num_clients": 2, "num_servers": 1},
    {"do": "serve", "generation": 2, "role": "server", "index": 1, "scheduler": "127.0.0.1:9999",
     "num_clients": 2, "num_servers": 1},
    {"do": "end", "generation": 1},
    {"do": "tell", "client": 1, "message": {"do": "go", "generation": 2, "num_clients": 3}},
]  # fmt: skip
LEADER = [
    {"say": "hello", "client": 1, "pid": 77, "life": 0},
    {"say": "register", "vector": {"name": "trainer0", "sizes": [4], "chunks": [[0, 4]]}},
    {"say": "held", "generation": 2, "fresh": 0.5},
]
SECRET = "01" * 32


class NoRoles(Roles):
    """The real ones, but that nothing is forked."""

    def __init__(self, say):
        self._say, self._ports, self._over, self._roles = say, Ports(), 0, {}

    def has(self, generation, role, index):
        return False

    def _begin(self, fields, address, terms, log):
        assert int(address.rpartition(":")[2]) < 65536 and set(fields) | set(terms)
        return SimpleNamespace(**fields)


class FakeLeader:
    client = pid = None

    def tell(self, message):
        encode(message)

    def drop(self):
        pass


def test_any_line_is_obeyed_or_refused():
    said, cases = [], Cases()
    dispatcher, leader = Dispatcher(said.append, NoRoles(said.append)), FakeLeader()
    dispatcher.from_leader(FakeLeader(), LEADER[0])
    for seed, random in seeds(0, 600):
        goods = LAUNCHER if seed % 2 else LEADER
        good = random.choice(goods)
        line = json_text(random, good).encode(errors="surrogatepass")
        if seed % 3 == 0:
            line = bytes_(random, json.dumps(good).encode(), b"\xff{[")
        to = dispatcher.from_launcher if goods is LAUNCHER else leader_of(dispatcher, leader)
        cases.ends_well(seed, line, lambda t=to, x=line: t(parse(x)), ["it", "has"])
    assert cases.count == 600 and cases.refused > 200
    assert all(encode(message) for message in said)


def leader_of(dispatcher, leader):
    return lambda message: dispatcher.from_leader(leader, message)


def test_any_stream_is_cut_into_lines_in_bounded_memory():
    cases = Cases()
    for seed, random in seeds(1000, 100):
        good = b"".join(encode(message) for message in [*LAUNCHER, *LEADER])
        data = bytes_(random, good, b"\n" * 99) * random.choice((1, 3))
        if seed % 20 == 0:
            data += b"x" * (LARGEST + random.randrange(-2, 3)) + b"\n" + good
        cases.ends_well(seed, data[:500], lambda d=data, r=random: _cut(d, r))
    assert cases.count == 100 and cases.refused == 0


def _cut(data, random):
    lines, got, at = Lines(), [], 0
    while at < len(data):
        size = random.choice((1, 7, 4096, 1 << 16)) if len(data) < 1 << 16 else 1 << 16
        got += lines.feed(data[at : at + size])
        assert len(lines._rest) <= LARGEST
        at += size
    wanted = [line for line in data.split(b"\n")[:-1] if len(line) <= LARGEST]
    assert got == wanted


class FakeStore:
    rank, updater = 0, None

    def _set_updater(self, updater):
        self.updater = updater


class FakeRule:
    outer = Outer()


def test_no_command_but_a_signed_one_changes_how_the_center_moves(caplog):
    caplog.set_level(logging.CRITICAL)
    good = sign(bytes.fromhex(SECRET), 7, encode_outer(Outer(0.9, 0.5)))
    cases = Cases()
    for seed, random in seeds(2000, 400):
        store, rule = FakeStore(), FakeRule()
        controller = Controller(store, rule, print, Terms("h:1", 2, 1, 7, SECRET))
        text = bytes_(random, good.encode(), sign(b"", 7, encode_outer(Outer())).encode())
        if seed % 2:
            text = json_text(random, json.loads(good)).encode(errors="surrogatepass")
        command = random.choice((0, 0, 0, 1, 2, -1, 2**31 - 1))
        cases.ends_well(seed, (command, text), lambda: controller.obey(command, text))  # noqa: B023
        if rule.outer != Outer() or store.updater is not None:
            assert json.loads(text) == json.loads(good) and command == 0, (seed, text)
        else:
            assert controller.dropped == 1, (seed, text)
    assert cases.count == 400 and cases.refused == 0
