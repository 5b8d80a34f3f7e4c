"""A real station and the leaders that come to it, played by the test: ``Station(folder)``."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from gluon_esgd.center.lines import Lines, encode, parse, short_path
from gluon_esgd.launch import proc

Message = Dict[str, Any]

SECRET = "5e" * 32
LIMIT_S = 60.0


class Heard:
    """Messages that arrive on a descriptor, in order; each is taken once."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lines = fd, Lines()
        self.all: List[Message] = []  # not yet taken
        self.over = False

    def read(self, limit_s: float) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not self.over and poll.poll(1000 * limit_s):
            try:
                data = os.read(self._fd, 1 << 16)
            except ConnectionError:
                data = b""
            self.over = not data
            self.all += [parse(line) for line in self._lines.feed(data)]

    def take(self, true: Callable[[Message], bool], limit_s: float = LIMIT_S) -> Message:
        """Return the next message for which `true`; leave the others."""
        end = time.monotonic() + limit_s
        while True:
            for message in self.all:
                if true(message):
                    self.all.remove(message)
                    return message
            left = end - time.monotonic()
            assert left > 0 and not self.over, f"over: {self.over}; heard {self.all}"
            self.read(left)

    def say(self, say: str, **fields: Any) -> Message:
        """Take the next message that says `say` and has these fields."""
        wanted = {"say": say, **fields}
        return self.take(lambda message: {**message, **wanted} == message)


class Station:
    """A station of its own; the test is its launcher."""

    def __init__(self, folder: Path) -> None:
        self.logs, self.socket = folder / "logs", folder / "state" / "host0.sock"
        self.marker = f"GLUON_ESGD_JOB_DIR={folder}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gluon_esgd.center.station"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "GLUON_ESGD_JOB_DIR": str(folder)},
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self.heard = Heard(self._stdout.fileno())

    def begin(self) -> Message:
        paths = {"socket": str(self.socket), "logs": str(self.logs)}
        self.do("begin", secret=SECRET, **paths)
        return self.heard.say("up")

    def send(self, data: bytes) -> None:
        self._stdin.write(data)
        self._stdin.flush()

    def do(self, do: str, **fields: Any) -> None:
        self.send(encode({"do": do, **fields}))

    def serve(self, generation: int, clients: int, servers: int) -> Dict[str, Message]:
        """Begin a generation; return what was said of 'scheduler', 'server0', ..."""
        counts = {"generation": generation, "num_clients": clients, "num_servers": servers}
        self.do("serve", role="scheduler", index=0, host="127.0.0.1", port=0, **counts)
        out = {"scheduler": self.heard.say("serving", generation=generation, role="scheduler")}
        for k in range(servers):
            address = out["scheduler"]["address"]
            self.do("serve", role="server", index=k, scheduler=address, **counts)
        for k in range(servers):
            out[f"server{k}"] = self.heard.say("serving", role="server", index=k)
        return out

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()

    @property
    def zygotes(self) -> List[int]:
        """Its children that are zygotes; orphans of a former one may be children too."""
        pid = self.process.pid
        children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in children if os.getsid(child) == child]

    def end_input(self) -> None:
        self._stdin.close()

    def close(self) -> int:
        """End its standard input; return its exit code."""
        self.end_input()
        return self.process.wait(10.0)

    def kill(self) -> None:
        """Clean up, whatever there still is."""
        self.process.kill()
        self.process.wait()
        self._stdin.close()
        self._stdout.close()
        proc.kill_job(self.marker)


class FakeLeader:
    """A leader's connection, with nothing behind it."""

    def __init__(self, station: Station) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(LIMIT_S)
        with short_path(str(station.socket)) as path:
            self.sock.connect(path)
        self.heard = Heard(self.sock.fileno())

    def say(self, say: str, **fields: Any) -> None:
        self.sock.sendall(encode({"say": say, **fields}))

    def hello(self, client: int, pid: int = 7) -> Message:
        message = {"say": "hello", "client": client, "pid": pid, "life": 0}
        self.sock.sendall(encode(message))
        return message

    def close(self) -> None:
        self.sock.close()
