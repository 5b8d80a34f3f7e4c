"""The agent's side without a server: which buffer is written when, and what a server obeys."""

from __future__ import annotations

import logging
import pickle
from typing import Any, Dict, List

import mxnet as mx
import numpy as np
import pytest

from gluon_esgd.center import even_chunks
from gluon_esgd.center.memory import Memory
from gluon_esgd.center.server import ACCUMULATE, COMMAND, _obey, accumulate
from gluon_esgd.center.store import StoredVector

N = 10


def out_bytes(center: Dict[str, np.ndarray]) -> bytes:
    return np.concatenate([center[f"m.{i}"] for i in range(2)]).tobytes()


class FakeKV:
    """Servers in this process, with the store's habit: the array pushed last is its buffer."""

    def __init__(self) -> None:
        self.center: Dict[str, np.ndarray] = {}
        self.own: Dict[str, Any] = {}
        self.memory: Memory
        self.whole: List[bytes] = []  # the centers that may be called whole

    def init(self, keys: List[str], values: List[Any]) -> None:
        self.center.update({key: value.asnumpy() for key, value in zip(keys, values)})

    def push(self, keys: List[str], arrays: List[Any]) -> None:
        self.check()
        for key, array in zip(keys, arrays):
            self.center[key] = self.center[key] + array.asnumpy()
            self.own[key] = array

    def pull(self, keys: List[str], out: List[Any]) -> None:
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
    sync, client, num_clients = False, 0, 1

    def __init__(self) -> None:
        self.kv = FakeKV()

    def barrier(self) -> None: ...


@pytest.mark.parametrize("plan", ["eeppepaepp", "aappaapea", "pppeee"])
def test_a_whole_center_is_kept_at_every_instant(plan: str) -> None:
    store, memory = FakeStore(), Memory.create([N], even_chunks(N, 2))
    store.kv.memory = memory
    vector = StoredVector(store, "m", memory, {})  # type: ignore[arg-type]
    memory.x[:] = 1
    vector._seed_by_difference(True)
    assert (memory.buffers[memory.whole] == 1).all() and (memory.base == 1).all()
    for i, step in enumerate(plan):
        memory.x[:] = i + 2
        version = memory.version
        if step == "p":
            vector.pull()
        else:
            vector.exchange({"e": "esgd", "a": "asgd"}[step], 0.25)
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


def test_a_server_obeys_one_command_and_unpickles_nothing(caplog: Any) -> None:
    server = FakeServer()
    with caplog.at_level(logging.INFO):
        for command, body in ((0, pickle.dumps(Trap())), (7, ACCUMULATE.encode()), (0, b"")):
            _obey(server, accumulate, command, body)
            assert server.rule is None
            assert f"unknown command {command}" in caplog.records[-1].getMessage()
        _obey(server, accumulate, COMMAND, ACCUMULATE.encode())
    assert server.rule is accumulate


def test_the_servers_rule_adds_in_place() -> None:
    stored = kept = np.ones(3)
    accumulate("k", np.full(3, 2.0), stored)
    assert (kept == 3).all()
