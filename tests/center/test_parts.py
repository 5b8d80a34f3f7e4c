"""Contract, memory, messages, lifeline and roles, each alone and without a server."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

from gluon_esgd.center import CenterLink, even_chunks, lifeline, pslite, wire
from gluon_esgd.center.contract import check_contract, faults, row
from gluon_esgd.center.memory import Memory
from gluon_esgd.center.snapshots import Snapshots


def table(*contracts: Dict[str, int], seeders: Any = (0,)) -> np.ndarray:
    return np.stack([row(c, i in seeders) for i, c in enumerate(contracts)])


def test_equal_contracts_have_no_faults() -> None:
    contract = {"b": -3, "a": (1 << 24) - 1, "zero": 0, "checksum": 0xFFFFFFFF}
    assert faults(table(contract, dict(reversed(contract.items()))), contract) == []


def test_each_differing_entry_is_named_with_the_values() -> None:
    contracts = [{"n": 4, "m": -1, "s": 7}, {"n": 4, "m": -1, "s": 7}, {"n": 6, "m": 1, "s": 7}]
    for contract in contracts:  # every client finds the same
        assert faults(table(*contracts), contract) == [
            "m: client 0 has -1, client 2 has 1",
            "n: client 0 has 4, client 2 has 6",
        ]


def test_other_names_are_a_fault() -> None:
    (fault,) = faults(table({"n": 1}, {"m": 1}), {"n": 1})
    assert fault.startswith("names of the entries")


@pytest.mark.parametrize("seeders", [(), (0, 1)])
def test_exactly_one_client_seeds(seeders: tuple) -> None:
    assert faults(table({}, {}, seeders=seeders), {}) == [
        f"seeder: one client must be it, but clients {list(seeders)} are"
    ]


def test_a_client_that_said_nothing() -> None:
    rows = table({"n": 1}, {"n": 1})
    rows[1] = 0
    assert faults(rows, {"n": 1}) == ["client 1 did not state its entries"]


def test_contract_arguments() -> None:
    with pytest.raises(ValueError, match=r"contract\['n'\]=16777216 must be above"):
        check_contract({"n": 1 << 24}, 0)
    with pytest.raises(TypeError, match=r"contract\['n'\]=0\.5 must be an int"):
        check_contract({"n": 0.5}, 0)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="has 60 entries, 56 at most"):
        check_contract({str(i): i for i in range(60)}, 4)


def test_memory_is_seen_through_its_descriptor() -> None:
    sizes = [5, 1030]
    ours = Memory.create(sizes, even_chunks(1035, 2), [True, False])
    ours.x[:] = np.arange(1035)
    ours.kinds[:] = [0, 2]
    theirs = Memory(os.dup(ours.fd))
    assert theirs.sizes.tolist() == sizes and theirs.kinds.tolist() == [0, 2]
    assert theirs.chunks == even_chunks(1035, 2) and theirs.exact == [True, False]
    assert (theirs.x == np.arange(1035)).all()
    theirs.buffers[1][:] = 3
    theirs.base[:] = 4
    theirs.set_center(7, 1)
    theirs.count_moved(40)
    theirs.distance = 0.1
    assert (ours.version, ours.whole, ours.moved_bytes, ours.distance) == (7, 1, 40, 0.1)
    assert not ours.buffers[0].any() and (ours.base == 4).all()
    for memory in (ours, theirs):
        memory.close()
        memory.close()
    assert (ours.x == theirs.x).all()  # the mapping outlives the descriptor


def test_a_center_that_moves_while_it_is_copied_is_copied_again() -> None:
    class Moving(Memory):
        words: List[int]

        @property
        def center_word(self) -> int:
            return self.words.pop(0)

    memory = Moving.create([4], [(0, 4)])
    memory.buffers[0][:], memory.buffers[1][:] = 1, 2
    out = np.zeros(4, np.float32)
    memory.words = [2, 3, 3, 3]
    assert memory.copy_center(out) and (out == 2).all()
    memory.words = [0]
    assert not memory.copy_center(out) and (out == 2).all()
    memory.close()


def test_messages_carry_descriptors() -> None:
    one, other = wire.pair()
    with one, other:
        read, write = os.pipe()
        wire.send(one, {"a": [1, "x"]}, [write])
        message, (fd,) = wire.receive(other)
        assert message == {"a": [1, "x"]} and not os.get_inheritable(fd)
        os.write(fd, b"!")
        assert os.read(read, 1) == b"!"
        for descriptor in (read, write, fd):
            os.close(descriptor)
        with pytest.raises(BlockingIOError):
            wire.receive(other, socket.MSG_DONTWAIT)
        with pytest.raises(ValueError, match="over the limit"):
            wire.send(one, {"a": "x" * 70000})
        one.close()
        with pytest.raises(EOFError):
            wire.receive(other)


def test_the_lifeline_is_not_held_by_forked_children() -> None:
    read, write = os.pipe()
    line = lifeline.Lifeline()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # lives until the test ends
        os._exit(0)
    os.close(read)
    watcher = os.fork()
    if watcher == 0:
        os._exit(int(lifeline.is_cut(line.fd)))
    assert os.waitpid(watcher, 0)[1] == 0  # held: and asking has not taken it from us
    fd = os.dup(line.fd)
    line.close()
    watcher = os.fork()
    if watcher == 0:
        os._exit(int(lifeline.is_cut(fd)))
    assert os.WEXITSTATUS(os.waitpid(watcher, 0)[1]) == 1
    os.close(fd)
    os.close(write)
    os.waitpid(child, 0)


def test_environment_of_a_role() -> None:
    env = pslite.environment("worker", "localhost:91", 3, 2)
    assert env == {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "91",
        "DMLC_NUM_WORKER": "3",
        "DMLC_NUM_SERVER": "2",
        "DMLC_NODE_HOST": "127.0.0.1",
        "MXNET_KVSTORE_BIGARRAY_BOUND": str(2**31 - 1),
    }
    with pytest.raises(ValueError, match="role='boss' must be one of scheduler, server, worker"):
        pslite.environment("boss", "localhost:91", 3, 2)


def test_a_node_announces_its_address_towards_the_scheduler(monkeypatch: Any) -> None:
    asked = []

    class Probe:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def connect(self, target: Any) -> None:
            asked.append(target[0])

        def getsockname(self) -> Any:
            return ("10.9.8.7", 1)

    monkeypatch.setattr(pslite.socket, "gethostbyname", lambda host: "10.9.8.1")
    monkeypatch.setattr(pslite.socket, "socket", Probe)
    assert pslite.node_host("elsewhere") == "10.9.8.7" and asked == ["10.9.8.1"]


def test_a_role_replaces_all_that_was_said_before(monkeypatch: Any) -> None:
    before = {"PORT": "8080", "DMLC_ROLE": "server", "PS_VERBOSE": "2", "DMLC_INTERFACE": "x"}
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    for name in pslite.environment("server", "127.0.0.1:91", 1, 1):
        monkeypatch.setenv(name, "other")
    pslite.set_role("scheduler", "127.0.0.1:91", 1, 1)
    assert os.environ["DMLC_ROLE"] == "scheduler"
    assert not {"PORT", "PS_VERBOSE", "DMLC_INTERFACE"} & set(os.environ)


def test_the_leaders_side_loads_no_mxnet() -> None:
    code = "import sys, gluon_esgd.center; sys.exit(bool({'mxnet', 'mpi4py'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_all_faults_of_a_link_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        CenterLink("nowhere", client=0, num_clients=0, num_servers=1, sync=False, limit_s=0)
    for part in ["3 faults", "scheduler='nowhere' must", "num_clients=0 must", "limit_s=0 must"]:
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=re.escape("client=2 must be below num_clients=2")):
        CenterLink("h:1", client=2, num_clients=2, num_servers=1, sync=False)


def test_a_snapshot_is_read_into_x_where_layout_and_file_are_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory, folder = Memory.create([3, 2], [(0, 5)]), tmp_path / "center"
    snapshots = Snapshots(folder, every_s=1000.0)
    memory.buffers[1][:] = [1, 2, 3, 4, 5]
    memory.set_center(1, 1)
    snapshots.look({"a/b": (memory, 100.0)}, place=0)
    assert not folder.exists()  # it is not time
    snapshots.write({"a/b": (memory, 100.0)})
    (path,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    assert snapshots.read("a/b", memory) and memory.x.tolist() == [1, 2, 3, 4, 5]
    memory.buffers[1][:] = 7
    snapshots.write({"a/b": (memory, 99.0)})  # an older one
    assert snapshots.read("a/b", memory) and memory.x[0] == 1
    snapshots.write({"a/b": (memory, 101.0)})
    assert snapshots.read("a/b", memory) and memory.x[0] == 7
    assert not snapshots.read("a/b", Memory.create([2, 3], [(0, 5)]))
    assert not snapshots.read("other", memory)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:40], b"", b"PK" + whole, whole.replace(b"<f4", b"<i4")):
        path.write_bytes(damaged)
        memory.x[:] = 0
        assert not snapshots.read("a/b", memory) and not memory.x.any()
    assert caplog.text.count("not used") == 6
    assert f"{path} is of a network of other sizes, and is not used" in caplog.text
