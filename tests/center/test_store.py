"""The agent's side without a server: which buffer is written when, and what a server obeys."""

from __future__ import annotations

import logging
import pickle
from typing import Any, Dict, List

import mxnet as mx
import numpy as np
import pytest

from gluon_esgd.center import even_chunks
from gluon_esgd.center.keys import CENTER, PLAIN, STEP, Keys, span_of
from gluon_esgd.center.memory import ACKNOWLEDGED, IDLE, Memory
from gluon_esgd.center.rule import COMMAND, CenterRule, encode
from gluon_esgd.center.secret import sign
from gluon_esgd.center.server import Controller, Terms
from gluon_esgd.center.store import StoredVector
from gluon_esgd.optim import Outer

N = 10


def out_bytes(center: Dict[int, np.ndarray]) -> bytes:
    return np.concatenate([center[key] for key in (1, 2)]).tobytes()  # 0 is the table


class FakeKV:
    """Servers in this process, with the store's habit: the array pushed last is its buffer."""

    def __init__(self) -> None:
        self.center: Dict[int, np.ndarray] = {}
        self.own: Dict[int, Any] = {}
        self.memory: Memory
        self.whole: List[bytes] = []  # the centers that may be called whole

    def init(self, keys: List[int], values: List[Any]) -> None:
        self.center.update({key: value.asnumpy() for key, value in zip(keys, values)})

    def push(self, keys: List[int], arrays: List[Any]) -> None:
        self.check()
        for key, array in zip(keys, arrays):
            self.center[key] = self.center[key] + array.asnumpy()
            self.own[key] = array

    def pull(self, keys: List[int], out: List[Any]) -> None:
        for key, array in zip(keys, out):
            for target in (self.own.get(key, array), array):
                target[:] = np.nan  # killed in the middle, this is what would be left
            self.check()
        for key, array in zip(keys, out):
            for target in (self.own.get(key, array), array):
                target[:] = self.center[key]
        mx.nd.waitall()
        self.whole = [*self.whole[-1:], out_bytes(self.center)]

    def check(self) -> None:
        """What the memory calls the last whole center must be one, at any instant."""
        mx.nd.waitall()
        out = np.empty(N, np.float32)
        if self.memory.copy_center(out):
            assert out.tobytes() in self.whole


class FakeStore:
    sync, client, num_clients, compression, has_steps = False, 0, 1, None, False

    def __init__(self) -> None:
        self.kv, self.keys = FakeKV(), Keys(1)

    def barrier(self) -> None: ...


@pytest.mark.parametrize("plan", ["eeppepaepp", "aappaapea", "pppeee"])
def test_a_whole_center_is_kept_at_every_instant(plan: str) -> None:
    store, memory = FakeStore(), Memory.create([N], even_chunks(N, 2))
    store.kv.memory = memory
    vector = StoredVector(store, memory, {})  # type: ignore[arg-type]
    memory.x[:] = 1
    vector._seed_by_difference(True)
    assert (memory.buffers[memory.whole] == 1).all() and (memory.base == 1).all()
    for i, step in enumerate(plan):
        memory.x[:] = i + 2
        version = memory.version
        if step == "p":
            vector.pull()
        else:
            vector.exchange({"e": "esgd", "a": "asgd"}[step], 0.25, serial=i)
        assert memory.stage == ((0, IDLE) if step == "p" else (i, ACKNOWLEDGED))
        assert memory.version == version + 1
        assert memory.buffers[memory.whole].tobytes() == store.kv.whole[-1]
    memory.close()


class FakeServer:
    rank, rule = 0, None

    def _set_updater(self, rule: Any) -> None:
        self.rule = rule


class Trap:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


SECRET = b"\x07" * 32


def signed(body: str, secret: bytes = SECRET, generation: int = 3) -> bytes:
    return sign(secret, generation, body).encode()


NOT_OBEYED = [
    (0, pickle.dumps(Trap())),
    (0, b""),
    (0, encode(Outer()).encode()),
    (7, signed(encode(Outer()))),
    (0, signed(encode(Outer()), secret=b"")),
    (0, signed(encode(Outer()), generation=2)),
    (0, signed(encode(Outer())) + b" " * 4096),
    (0, signed("accumulate")),
    (0, signed("[" * 3000)),
    (0, signed("\ud800")),
    (0, signed("[0.5, 1.0]")),
    (0, signed('{"momentum": 0.5}')),
    (0, signed('{"momentum": 0.5, "learning_rate": 1.0, "nesterov": 1.0}')),
    (0, signed('{"momentum": "0.5", "learning_rate": 1.0}')),
    (0, signed('{"momentum": true, "learning_rate": 1.0}')),
    (0, signed('{"momentum": 1.0, "learning_rate": 1.0}')),
    (0, signed('{"momentum": NaN, "learning_rate": 1.0}')),
]


def controller() -> Controller:
    rule = CenterRule(1)
    return Controller(FakeServer(), rule, rule, Terms("h:1", 1, 1, 3, SECRET.hex()))


def test_a_server_obeys_one_signed_command_and_unpickles_nothing(caplog: Any) -> None:
    one = controller()
    server, rule = one._store, one._rule
    with caplog.at_level(logging.INFO):
        for count, (command, text) in enumerate(NOT_OBEYED, 1):
            one.obey(command, text)
            assert server.rule is None and rule.outer.is_plain
            said = caplog.records[-1].getMessage()
            assert f"command {command} of {len(text)} bytes was dropped" in said
            assert f"{count} dropped so far" in said
        one.obey(COMMAND, signed(encode(Outer(0.5, 2.0))))
    assert server.rule is rule and rule.outer == Outer(0.5, 2.0)
    assert SECRET.hex() not in caplog.text


def test_a_flood_of_commands_does_not_fill_the_log(caplog: Any) -> None:
    one = controller()
    for _ in range(5000):
        one.obey(0, b"")
    assert one.dropped == 5000
    assert [r.getMessage().split()[-4] for r in caplog.records[-3:]] == ["1024", "2048", "4096"]
    assert len(caplog.records) < 120


def test_the_servers_rule_adds_in_place() -> None:
    stored = kept = mx.nd.ones(3)
    CenterRule(1)(5, mx.nd.full(3, 2.0), stored)
    assert (kept.asnumpy() == 3).all()


def test_a_push_to_the_key_of_an_exchange_moves_the_center(caplog: Any) -> None:
    rule, keys = CenterRule(3), Keys(3)
    rule.outer = Outer(0.5, 2.0)
    center, answer = mx.nd.zeros(2), mx.nd.zeros(2, dtype="float16")
    step, plain = (keys.of_kind(kind, 7) for kind in (STEP, PLAIN))
    two = mx.nd.full(2, 2.0, dtype="float16")
    rule(step, two, answer)  # nobody has set it
    assert "key" in caplog.text and not answer.asnumpy().any()
    rule(7, mx.nd.ones(2), center)
    v, c = 0.0, 1.0
    for _ in range(3):
        rule(step, two, answer)
        v = 0.5 * v + 2
        c += 2 * (2 + 0.5 * v)
        assert (center.asnumpy() == c).all() and (answer.asnumpy() == c).all()
    rule(plain, two, answer)
    assert (center.asnumpy() == c + 2).all() and (answer.asnumpy() == c + 2).all()
    rule(7, mx.nd.ones(2), center)  # set anew: the velocity is zero again
    rule(step, two, answer)
    assert (center.asnumpy() == c + 3 + 2 * (2 + 0.5 * 2)).all()


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_keys_of_a_chunk_are_neighbours_and_mxnet_can_count_them(servers: int) -> None:
    keys = Keys(servers)
    first = keys.take(5)
    assert first == [0, 1, 2, 3, 4] and keys.take(2) == [5, 6]
    for kind in (CENTER, STEP, PLAIN):
        assert divmod(keys.of_kind(kind, 4), span_of(servers)) == (kind, 4)
        assert (keys.of_kind(kind, 4) * 9973 - 4 * 9973) % servers == 0
    assert keys.of_kind(PLAIN, span_of(servers) - 1) * 9973 < 2**31
    with pytest.raises(ValueError, match="chunks of vectors were attached in this job"):
        keys.take(70_000)
