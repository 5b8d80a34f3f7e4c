"""Real servers and links for tests; other folders' tests may use it too.

``with servers(num_clients, num_servers, delay_s=0.5) as address:`` starts a
scheduler and servers that take half a second for each push they receive.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

from gluon_esgd.center import CenterLink

SLOW = pathlib.Path(__file__).with_name("slow_server.py")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


class Servers:
    """A scheduler and servers on loopback; `servers[i].kill()` and so on are the test's."""

    def __init__(self, num_clients: int, num_servers: int, delay_s: float = 0.0) -> None:
        self.num_clients, self.num_servers = num_clients, num_servers
        self.address = f"127.0.0.1:{free_port()}"
        env = dict(
            {k: v for k, v in os.environ.items() if not k.startswith(("GLUON_ESGD_", "DMLC_"))},
            GLUON_ESGD_SCHEDULER=self.address,
            GLUON_ESGD_NUM_CLIENTS=str(num_clients),
            GLUON_ESGD_NUM_SERVERS=str(num_servers),
            OMP_NUM_THREADS="1",
        )
        module = ["-m", "gluon_esgd.center.server"] if not delay_s else [str(SLOW), str(delay_s)]
        self.scheduler, *self.servers = (
            subprocess.Popen([sys.executable, *module, role], env=env)
            for role in ["scheduler"] + ["server"] * num_servers
        )

    def close(self) -> None:
        for process in (self.scheduler, *self.servers):
            process.kill()
        for process in (self.scheduler, *self.servers):
            process.wait()


@contextlib.contextmanager
def servers(num_clients: int, num_servers: int, delay_s: float = 0.0) -> Iterator[str]:
    group = Servers(num_clients, num_servers, delay_s)
    try:
        yield group.address
    finally:
        group.close()


class Job:
    """Servers and one link per client, all in this process."""

    def __init__(
        self, num_clients: int, num_servers: int, sync: bool = False, delay_s: float = 0.0,
        each: Sequence[Dict[str, Any]] = (), servers: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        """`options` are those of all links; `each` has further ones for each."""
        self.servers = servers or Servers(num_clients, num_servers, delay_s)
        self.num_clients, self.num_servers, self.mailboxes = num_clients, num_servers, 0
        self.links: List[CenterLink] = [
            CenterLink(
                self.servers.address, client=i, num_clients=num_clients, num_servers=num_servers,
                sync=sync, **{**options, **(each[i] if each else {})},
            )
            for i in range(num_clients)
        ]  # fmt: skip

    def name(self) -> str:
        self.mailboxes += 1
        return f"m{self.mailboxes}"

    def all(self, call: Callable[..., Any], *arguments: Sequence[Any]) -> List[Any]:
        """Make a collective call: ``call(argument of client i, ...)`` in a thread each."""
        results: List[Any] = [None] * self.num_clients
        errors: List[Optional[BaseException]] = [None] * self.num_clients

        def run(i: int) -> None:
            try:
                results[i] = call(*(column[i] for column in arguments))
            except BaseException as error:
                errors[i] = error

        threads = [threading.Thread(target=run, args=(i,)) for i in range(self.num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if error is not None:
                error.others = errors  # type: ignore[attr-defined]
                raise error
        return results

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.servers.close()
