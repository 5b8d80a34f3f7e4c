"""What becomes of each message that reaches a station; knows nothing of sockets."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Optional, Protocol

from .lines import integer, text
from .roles import Roles
from .server import ROLES

__all__ = ["Dispatcher", "Leader"]

Message = Dict[str, Any]


class Leader(Protocol):
    """A leader's connection as the dispatcher sees it.

    Attributes
    ----------
    client, pid : int or None
        As the leader said in its hello.
    """

    client: Optional[int]
    pid: Optional[int]

    def tell(self, message: Message) -> None:
        """Send `message`."""

    def drop(self) -> None:
        """End the connection."""


class Dispatcher:
    """Obeys the launcher, and passes on what it and the leaders have for each other.

    Its methods raise ValueError where a message is malformed or cannot be followed; the caller
    logs that.

    Parameters
    ----------
    say : callable
        Takes messages for the launcher.
    roles : Roles
        Scheduler and servers on this host.
    """

    def __init__(self, say: Callable[[Message], None], roles: Roles) -> None:
        self._say, self._roles = say, roles
        self._leaders: Dict[int, Leader] = {}
        self._commands: Mapping[str, Callable[[Message], None]] = {
            "serve": self._serve,
            "end": lambda message: roles.end(integer(message, "generation")),
            "tell": self._tell,
        }

    def from_launcher(self, message: Message) -> None:
        """Obey."""
        command = self._commands.get(text(message, "do"))
        if command is None:
            raise ValueError(f"its 'do' must be one of {', '.join(self._commands)}, after 'begin'")
        command(message)

    def _serve(self, message: Message) -> None:
        generation, role = integer(message, "generation", 1), text(message, "role")
        index = integer(message, "index") if role == "server" else 0
        terms = {name: integer(message, name, 1) for name in ("num_clients", "num_servers")}
        if role not in ROLES:
            raise ValueError(f"its 'role' must be one of {', '.join(ROLES)}")
        if self._roles.has(generation, role, index):
            raise ValueError(f"{role} {index} of generation {generation} is there or over already")
        if role == "scheduler":
            port = integer(message, "port")
            self._roles.scheduler(generation, text(message, "host"), port, terms)
        else:
            self._roles.server(generation, index, _address(message), terms)

    def _tell(self, message: Message) -> None:
        client, inner = integer(message, "client"), message.get("message")
        if not isinstance(inner, dict):
            raise ValueError("its 'message' must be an object")
        if client not in self._leaders:
            raise ValueError(f"the leader of client {client} is not connected")
        self._leaders[client].tell(inner)

    def from_leader(self, leader: Leader, message: Message) -> None:
        """Pass on; the first message must be a hello."""
        if text(message, "say") == "hello":
            self._welcome(leader, message)
        if leader.client is None:
            raise ValueError("it comes before a hello")
        self._say({"say": "heard", "client": leader.client, "message": message})

    def _welcome(self, leader: Leader, hello: Message) -> None:
        client, pid = integer(hello, "client"), integer(hello, "pid", 1)
        integer(hello, "life")
        if leader.client not in (None, client):
            raise ValueError(f"it comes from client {leader.client} and names client {client}")
        before = self._leaders.get(client)
        leader.client, leader.pid, self._leaders[client] = client, pid, leader
        if before is not None and before is not leader:
            before.drop()

    def left(self, leader: Leader) -> None:
        """Take note that a connection is over; a leader that was replaced is not missed."""
        if leader.client is not None and self._leaders.get(leader.client) is leader:
            del self._leaders[leader.client]
            self._say({"say": "gone", "client": leader.client, "pid": leader.pid})


def _address(message: Message) -> str:
    address = text(message, "scheduler")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("its 'scheduler' must be host:port")
    return address
