"""One zygote for the servers and agents of many tests: what a start costs is to import MXNet.

They are real ones and do not know it. Tests of how processes end have them for themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from pathlib import Path
from typing import Any, Iterator, List, Mapping
from unittest import mock

from gluon_esgd.center import servers_link, wire
from gluon_esgd.center.ends import ZygoteEnd
from gluon_esgd.center.lifeline import Lifeline

from .servers import Job, free_port


class SharedZygote:
    """A zygote of this process; `folder` takes the logs of servers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tags = folder, itertools.count()
        self._lifeline = Lifeline()
        self.end = ZygoteEnd(self._lifeline)

    @contextlib.contextmanager
    def behind_links(self) -> Iterator[None]:
        """Links that are made now ask it for their agents."""
        with mock.patch.object(servers_link, "ZygoteEnd", lambda *_: Share(self)):
            yield

    def job(self, num_clients: int, num_servers: int, **options: Any) -> Job:
        """Make a `Job` whose servers and agents it forks."""
        servers = SharedServers(self, num_clients, num_servers)
        with self.behind_links():
            return Job(num_clients, num_servers, servers=servers, **options)

    def close(self) -> None:
        self.end.close()
        self._lifeline.close()


class Share:
    """What a link takes for its own zygote."""

    alive = True

    def __init__(self, shared: SharedZygote) -> None:
        self._shared, self._tags = shared, {}  # type: SharedZygote, Dict[int, int]

    def fork(self, role: str, tag: int, terms: Mapping[str, Any], fd: int) -> None:
        self._tags[tag] = next(self._shared.tags)
        self._shared.end.fork(role, self._tags[tag], terms, fd)
        self.hear()

    def kill(self, tag: int) -> None:
        self._shared.end.kill(self._tags[tag])

    def fate(self, tag: int, timeout_s: float) -> str:
        return self._shared.end.fate(self._tags[tag], timeout_s)

    def hear(self) -> None:
        self._shared.end.hear()

    def close(self) -> None:
        """Do nothing: agents end with their sockets."""


class SharedServers:
    """A scheduler and servers on loopback; they end with their sockets."""

    def __init__(self, shared: SharedZygote, num_clients: int, num_servers: int) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._sockets: List[socket.socket] = []
        zygote = Share(shared)
        terms = {"scheduler": self.address, "num_clients": num_clients, "num_servers": num_servers}
        for tag, role in enumerate(["scheduler"] + ["server"] * num_servers):
            ours, theirs = wire.pair()
            log = shared.folder / f"{role}-{self.address}-{tag}"
            with theirs:
                zygote.fork(role, tag, {**terms, "log": str(log)}, theirs.fileno())
            self._sockets.append(ours)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
