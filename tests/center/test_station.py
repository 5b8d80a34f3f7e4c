"""Real stations, with the test as launcher and leaders: generations, ends, and what is dropped."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest

from gluon_esgd.center import wire
from gluon_esgd.center.ends import AgentEnd, ZygoteEnd
from gluon_esgd.center.lifeline import Lifeline
from gluon_esgd.center.lines import LARGEST, encode
from gluon_esgd.center.memory import Memory
from gluon_esgd.center.zygote import Zygote
from gluon_esgd.launch import proc

from .stations import LIMIT_S, SECRET, FakeLeader, Message, Station
from .test_faults import ended, ignores_sigint, until

pytestmark = pytest.mark.servers

N = 4
CHUNKS = [(0, 2), (2, 4)]


@contextlib.contextmanager
def begun(folder: Path) -> Iterator[Station]:
    station = Station(folder)
    try:
        station.begin()
        yield station
        assert station.close() == 0
    finally:
        station.kill()


@pytest.fixture(scope="module")
def station(tmp_path_factory: Any) -> Iterator[Station]:
    with begun(tmp_path_factory.mktemp("deep") / ("d" * 100)) as one:  # no path for a sun_path
        yield one


@pytest.fixture(scope="module")
def generation() -> Iterator[Any]:
    """Numbers of generations of the shared station."""
    return iter(range(1, 1000))


@pytest.fixture(scope="module")
def zygote() -> Iterator[ZygoteEnd]:
    """The leaders': it forks their agents."""
    lifeline = Lifeline()
    end = ZygoteEnd(lifeline)
    yield end
    end.close()
    lifeline.close()


def pids(roles: Dict[str, Message]) -> List[int]:
    return [message["pid"] for message in roles.values()]


class Agents:
    """Agents of one generation, a mailbox's memory each."""

    tags = iter(range(1000))

    def __init__(self, zygote: ZygoteEnd, address: str, terms: List[Dict[str, Any]]) -> None:
        count = len(terms)
        common = {"scheduler": address, "num_clients": count, "num_servers": 2, "sync": False}
        self.ends = [
            AgentEnd(zygote, {**common, "client": i, **own}, next(self.tags), None)
            for i, own in enumerate(terms)
        ]
        self.memories = [Memory.create([N], CHUNKS) for _ in terms]

    def all(self, command: str, each: List[Dict[str, Any]]) -> None:
        """Ask all, then wait for all."""
        tickets = [
            end.ask(command, [memory.fd] if command == "attach" else [], name="m", **fields)
            for end, memory, fields in zip(self.ends, self.memories, each)
        ]
        for end, ticket in zip(self.ends, tickets):
            assert end.answer(ticket, LIMIT_S) is not None

    def close(self) -> None:
        for end, memory in zip(self.ends, self.memories):
            end.close()
            memory.close()


def test_a_generation_and_what_it_does_not_obey(
    station: Station, generation: Any, zygote: ZygoteEnd
) -> None:
    g = next(generation)
    roles = station.serve(g, clients=2, servers=2)
    own = {"generation": g, "secret": SECRET}
    stranger = {**own, "secret": "00" * 32}
    agents = Agents(zygote, roles["scheduler"]["address"], [own, stranger])
    try:
        assert all(end.wait_ready(LIMIT_S) for end in agents.ends)
        agents.all("attach", [{"contract": {}}] * 2)
        agents.memories[0].x[:] = 1
        agents.all("seed", [{"seeder": True}, {"seeder": False}])
        agents.memories[1].x[:] = 5
        agents.ends[1].call("", LIMIT_S, "exchange", name="m", rule="esgd", alpha=0.5, serial=1)
        agents.ends[0].call("", LIMIT_S, "pull", name="m", sync=False, rebase=False)
        center = np.empty(N, np.float32)
        assert agents.memories[0].copy_center(center) and (center == 3).all()
    finally:
        agents.close()
    for k in range(2):
        log = station.log(f"server{k}")
        assert "wrong digest; 1 dropped so far" in log and log.count("adds up") == 1
        assert f"pid {roles[f'server{k}']['pid']}, generation {g}" in log
    assert "generation" in station.log("scheduler")
    assert all(ignores_sigint(pid) for pid in pids(roles))
    station.do("end", generation=g)
    until(lambda: all(map(ended, pids(roles))), 5.0)


@pytest.mark.parametrize("victim", ["scheduler", "server1"])
def test_a_killed_role_is_told_and_an_end_that_was_asked_for_is_not(
    station: Station, generation: Any, victim: str
) -> None:
    older, g = next(generation), next(generation)
    old, roles = station.serve(older, 1, 1), station.serve(g, 1, 2)
    assert old["scheduler"]["address"] != roles["scheduler"]["address"]
    os.kill(roles[victim]["pid"], signal.SIGKILL)
    told = station.heard.say("ended", generation=g, pid=roles[victim]["pid"])
    assert told["role"] == victim.rstrip("1") and told["index"] == int(victim == "server1")
    assert told["how"] == "was killed by SIGKILL"
    station.do("end", generation=older)
    until(lambda: all(map(ended, pids(old))), 5.0)
    assert sum(map(ended, pids(roles))) == 1  # a newer one stays
    os.kill(roles["server0"]["pid"], signal.SIGSTOP)  # as if it hung
    station.do("end", generation=g)
    until(lambda: all(map(ended, pids(roles))), 5.0)
    again = {"generation": g, "num_clients": 1, "num_servers": 1}  # a generation that is over
    station.do("serve", role="scheduler", index=0, host="127.0.0.1", port=0, **again)
    _everything_was_told(station)
    assert "is there or over already" in station.log("station")


def _everything_was_told(station: Station) -> None:
    """Nothing is left to say: what is told next is the answer to what is asked next."""
    leader = FakeLeader(station)
    hello = leader.hello(99)
    station.heard.take(lambda message: message.get("message") == hello)
    leader.close()
    station.heard.say("gone", client=99)
    assert station.heard.all == []


def test_roles_outlive_their_zygote_and_the_next_ones_get_another(
    station: Station, generation: Any
) -> None:
    g, newer = next(generation), next(generation)
    roles, (first,) = station.serve(g, 1, 2), station.zygotes
    os.kill(first, signal.SIGKILL)
    until(lambda: ended(first), 5.0)
    assert not any(map(ended, pids(roles)))
    os.kill(roles["server0"]["pid"], signal.SIGKILL)
    told = station.heard.say("ended", generation=g, role="server", index=0)
    assert told["how"] == "was killed by SIGKILL" and told["pid"] == roles["server0"]["pid"]
    new = station.serve(newer, 1, 1)
    (second,) = station.zygotes
    assert second != first and not ended(roles["server1"]["pid"])
    station.do("end", generation=newer)
    until(lambda: all(map(ended, [*pids(roles), *pids(new)])), 5.0)
    _everything_was_told(station)


def test_a_role_whose_zygote_ends_before_it_forks_is_told(tmp_path: Path) -> None:
    with begun(tmp_path) as station:
        (zygote,) = station.zygotes
        os.kill(zygote, signal.SIGSTOP)
        counts = {"generation": 1, "num_clients": 1, "num_servers": 1}
        station.do("serve", role="server", index=0, scheduler="127.0.0.1:9", **counts)
        _everything_was_told(station)
        os.kill(zygote, signal.SIGKILL)
        told = station.heard.say("ended", generation=1, role="server", pid=0)
        assert told["how"] == "was not started: its zygote ended with -9"


def test_a_fork_that_fails_is_the_end_of_one_child_only(monkeypatch: Any) -> None:
    def fail() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    (ours, theirs), (control, _leader) = wire.pair(), wire.pair()
    with ours, control, _leader:
        zygote = Zygote(control, -1, {})
        zygote._obey({"fork": "server", "tag": 1, "terms": {}}, [theirs.detach()])
        ours.settimeout(LIMIT_S)
        assert ours.recv(1) == b"" and not zygote._children


def test_a_role_that_cannot_be_started_is_told(station: Station, generation: Any) -> None:
    g = next(generation)
    counts = {"generation": g, "num_clients": 1, "num_servers": 1}
    fields = {"role": "scheduler", "index": 0, **counts}
    station.do("serve", host="203.0.113.7", port=0, **fields)  # nobody's, says RFC 5737
    told = station.heard.say("ended", generation=g, role="scheduler", pid=0)
    assert "was not started: host 203.0.113.7, port 0: " in told["how"]
    station.do("end", generation=g)


def test_leaders_and_launcher_hear_each_other(station: Station) -> None:
    one, other = FakeLeader(station), FakeLeader(station)
    for client, leader in ((3, one), (4, other)):
        hello = leader.hello(client)
        assert station.heard.say("heard", client=client)["message"] == hello
    vector = {"say": "register", "vector": {"name": "gewölbe", "sizes": [1]}, "sync": False}
    one.say(**vector)
    assert station.heard.say("heard", client=3)["message"] == vector
    station.do("tell", client=5, message={"do": "go"})  # to nobody
    station.do("tell", client=4, message={"do": "go", "generation": 8})
    assert other.heard.take(lambda _: True) == {"do": "go", "generation": 8}
    again = FakeLeader(station)
    again.hello(3, pid=8)
    station.heard.say("heard", client=3)
    one.heard.read(LIMIT_S)
    assert one.heard.over and not one.heard.all
    station.do("tell", client=3, message={"do": "go"})
    assert again.heard.take(lambda _: True) == {"do": "go"}
    again.close()
    assert station.heard.say("gone")["pid"] == 8  # the first time that one is said
    other.close()
    station.heard.say("gone", client=4)
    one.close()


GARBAGE = [
    b"",
    b"\xff\xfe\x00",
    b"{",
    b"[]",
    b"7",
    b"[" * 5000,
    b"{}",
    b'{"do": 7, "say": 7}',
    b'{"do": "dance", "say": "hello"}',
    b'{"do": "begin", "say": "hello", "client": 1, "pid": 1}',
    b'{"do": "end", "say": "hello", "client": -1, "pid": 1, "life": 0}',
    b'{"do": "end", "generation": true, "say": "hello", "client": "1", "pid": 1, "life": 0}',
    b'{"do": "tell", "client": 0, "message": 7, "say": "ready"}',
    b'{"do": "serve", "generation": 999, "role": "agent", "index": 0, "num_clients": 1}',
    b'{"do": "serve", "generation": 999, "role": "server", "index": 0, "scheduler": "h:x",'
    b' "num_clients": 1, "num_servers": 1}',
    b'{"do": "serve", "generation": 999, "role": "scheduler", "index": 0, "port": 70000,'
    b' "host": "127.0.0.1", "num_clients": 1, "num_servers": 1}',
]


def test_garbage_is_dropped(station: Station) -> None:
    leader = FakeLeader(station)
    for line in GARBAGE:
        station.send(line + b"\n")
        leader.sock.sendall(line + b"\n")
    station.send(b"x" * (LARGEST + 1) + b"\n")
    told = station.heard.say("ended", generation=999)
    assert "port 70000" in told["how"]
    leader.hello(6)
    station.heard.say("heard", client=6)
    leader.hello(7)  # it has said who it is
    leader.say("ready", generation=1)
    assert station.heard.say("heard", client=6)["message"]["say"] == "ready"
    log = station.log("station")
    assert log.count("a message from the launcher was dropped") >= len(GARBAGE)
    assert "Traceback" not in log and SECRET not in log
    with contextlib.suppress(ConnectionError):
        leader.sock.sendall(b"x" * (LARGEST + 1))
    station.heard.say("gone", client=6)
    assert station.process.poll() is None
    leader.close()


def test_a_leader_that_does_not_read_is_dropped(station: Station) -> None:
    leader = FakeLeader(station)
    leader.hello(6)
    station.heard.say("heard", client=6)
    for _ in range(8):
        station.do("tell", client=6, message={"do": "x" * (LARGEST - 100)})
    station.heard.say("gone", client=6)
    leader.close()


def test_leaders_wait_while_the_launcher_does_not_read(station: Station) -> None:
    leader, poll, sent = FakeLeader(station), select.poll(), 0
    leader.hello(6)
    station.heard.say("heard", client=6)
    leader.sock.setblocking(False)
    poll.register(leader.sock, select.POLLOUT)
    data = encode({"say": "progress", "text": "x" * 1000}) * 16000
    while sent < len(data) and poll.poll(500):
        sent += leader.sock.send(data[sent:])
    assert sent < 4 << 20
    leader.sock.settimeout(LIMIT_S)
    leader.sock.shutdown(socket.SHUT_WR)
    station.heard.say("gone", client=6)
    assert len(station.heard.all) == sent * 16000 // len(data)
    station.heard.all.clear()
    leader.close()


def test_the_socket_and_the_logs_are_private(station: Station) -> None:
    assert stat.S_IMODE(station.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(station.socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(station.logs.stat().st_mode) == 0o700
    assert {stat.S_IMODE(log.stat().st_mode) for log in station.logs.iterdir()} == {0o600}


@pytest.mark.parametrize("way", ["end of input", "SIGTERM", "SIGKILL"])
def test_roles_end_with_their_station(tmp_path: Path, way: str) -> None:
    station = Station(tmp_path)
    try:
        station.begin()
        roles, (zygote,) = station.serve(1, 1, 2), station.zygotes
        assert ignores_sigint(station.process.pid)
        if way == "SIGKILL":
            os.kill(zygote, signal.SIGKILL)  # then they must see it by themselves
            until(lambda: ended(zygote), 5.0)
            station.process.kill()
        elif way == "SIGTERM":
            for pid in (zygote, *pids(roles)):
                os.kill(pid, signal.SIGSTOP)  # that does not help them
            station.process.terminate()
        else:
            station.end_input()
        code = station.process.wait(10.0)
        assert code == (-signal.SIGKILL if way == "SIGKILL" else 0)
        until(lambda: all(map(ended, (zygote, *pids(roles)))), 5.0)
        until(lambda: not proc.job_processes(station.marker), 5.0)
        assert station.socket.exists() == (way == "SIGKILL")
    finally:
        station.kill()


def test_a_new_station_takes_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    first, second = Station(tmp_path), Station(tmp_path)
    try:
        first.begin()
        second.begin()
        first.end_input()
        assert first.process.wait(10.0) == 0
        leader = FakeLeader(second)  # the first has not removed what is not its own
        leader.hello(0)
        second.heard.say("heard", client=0)
        leader.close()
    finally:
        first.kill()
        second.kill()


def test_a_station_that_cannot_listen_says_so(tmp_path: Path) -> None:
    station = Station(tmp_path)
    try:
        station.do("serve")  # before it has begun
        (tmp_path / "state").touch()
        paths = {"socket": str(station.socket), "logs": str(station.logs)}
        station.do("begin", secret="no", **paths)
        station.do("begin", secret=SECRET, **paths)
        assert station.process.wait(LIMIT_S) == 1
        assert "File exists" in station.log("station")
        assert "Traceback" not in station.log("station")
    finally:
        station.kill()
