"""Datagrams between leader, zygote and agent: cut, too long, no JSON, with descriptors."""

from __future__ import annotations

import array
import json
import os
import socket

from gluon_esgd.center import wire

from .mutation import Cases, bytes_, json_text, seeds

GOOD = {"ticket": 5, "command": "exchange", "fields": {"name": "trainer0", "rule": "esgd"}}


def test_any_datagram_is_a_message_or_refused_and_no_descriptor_is_lost():
    cases, good = Cases(EOFError), json.dumps(GOOD).encode()
    before = len(os.listdir("/proc/self/fd"))
    for seed, random in seeds(0, 400):
        if seed % 2:
            data = json_text(random, GOOD).encode(errors="surrogatepass")
        else:
            data = bytes_(random, good, b"\xff\x00{{[" * 20)
        fds = [0] * random.choice((0, 0, 1, 3, 8, 9, 40))
        ours, theirs = wire.pair()
        with ours, theirs:
            if not _put(theirs, data, fds):
                theirs.close()
            case = lambda sock=ours: _received(sock)  # noqa: E731
            error = cases.ends_well(seed, (len(fds), data), case, ["message"] if data else [])
            assert error or len(fds) <= 8, seed
    assert cases.count == 400 and cases.refused > 150
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_longer_than_the_limit_is_refused_on_both_sides():
    cases = Cases()
    long = {"text": "x" * (1 << 16)}
    ours, theirs = wire.pair()
    with ours, theirs:
        cases.ends_well(0, "send", lambda: wire.send(theirs, long), ["message"])
        theirs.send(json.dumps(long).encode())
        cases.ends_well(1, "receive", lambda: wire.receive(ours), ["message"])
        wire.send(theirs, GOOD)
        assert wire.receive(ours) == (GOOD, [])  # the connection goes on
    assert cases.refused == 2


def _put(sock, data, fds):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([data[: 1 << 17]], rights)
    except OSError:
        return False
    return True


def _received(sock):
    message, fds = wire.receive(sock)
    for fd in fds:
        os.close(fd)
    assert isinstance(message, dict) and len(fds) <= 8
