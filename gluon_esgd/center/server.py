"""Scheduler and server of the center, started by hand or forked by a station's zygote.

By hand: ``python -m gluon_esgd.center.server scheduler|server``, for the job of the settings.

MXNet's own roles, but with a controller of ours. The stock server unpickles an
optimizer from the network; this one obeys one command, of a fixed form and
signed for its job and generation (`secret`), and moves the center by what it
is sent (`rule`). It logs on standard output and ends on SIGTERM; the
terminal's SIGINT, meant for the training processes, leaves it alone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from .. import settings
from . import pslite
from .secret import verify

if TYPE_CHECKING:
    from .rule import CenterRule

__all__ = ["ROLES", "Controller", "Terms", "main", "run", "serve"]

Updater = Callable[[Any, Any, Any], None]

ROLES = ("scheduler", "server")

_ALL_LOGGED = 100  # dropped commands; of more only some are, so that nobody fills the disk

_log = logging.getLogger("gluon_esgd.center.server")


def _as_it_is(updater: Updater) -> Updater:
    return updater


@dataclass(frozen=True)
class Terms:
    """What a role must know of its generation; `secret` is in hex, empty for one begun by hand."""

    scheduler: str
    num_clients: int
    num_servers: int
    generation: int = 0
    secret: str = field(default="", repr=False)


def serve(role: str, wrap: Callable[[Updater], Updater] = _as_it_is) -> None:
    """Be the scheduler or a server of the job that the settings describe, until killed.

    Parameters
    ----------
    role : str
        'scheduler' or 'server'.
    wrap : callable, optional
        ``wrap(updater)`` is called for each push, with key, what was received and what is stored,
        in place of the updater itself.

    Raises
    ------
    ValueError
        Where the role is another or the settings name no scheduler or no servers.
    """
    if role not in ROLES:
        raise ValueError(f"role={role!r} must be 'scheduler' or 'server'")
    job = settings.read()
    if job.scheduler is None or job.num_servers < 1:
        raise ValueError(
            f"a {role} needs GLUON_ESGD_SCHEDULER (host:port; got {job.scheduler}) and "
            f"GLUON_ESGD_NUM_SERVERS of at least 1 (got {job.num_servers}); "
            "'gluon-esgd run' sets them"
        )
    _be(role, Terms(job.scheduler, job.num_clients, job.num_servers), wrap)


def run(role: str, sock: socket.socket, log: str, terms: Mapping[str, Any]) -> None:
    """Be a role in a process that was forked for it, under the fields of `Terms`.

    It writes to the file `log`. It ends with `sock`, that is with its station, which forks nobody
    who could keep the other end open.
    """
    for fd in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), fd)
    threading.Thread(target=_end_with, args=(sock,), name="station", daemon=True).start()
    _be(role, Terms(**terms), _as_it_is)


def _end_with(sock: socket.socket) -> None:
    try:
        while sock.recv(1):
            pass
    finally:
        os._exit(0)


def _be(role: str, terms: Terms, wrap: Callable[[Updater], Updater]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    layout = "%(asctime)s %(message)s"
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format=layout, force=True)
    for name in pslite.variables(os.environ):
        del os.environ[name]
    import mxnet as mx

    from .rule import CenterRule

    pslite.set_role(role, terms.scheduler, terms.num_clients, terms.num_servers)
    _log.info(
        "%s, pid %d, generation %d: scheduler at %s, %d clients, %d servers", role, os.getpid(),
        terms.generation, terms.scheduler, terms.num_clients, terms.num_servers,
    )  # fmt: skip
    rule = CenterRule(terms.num_servers)
    store = mx.kv.create("dist")
    _run(store, Controller(store, rule, wrap(rule), terms))


def _run(store: Any, controller: Controller) -> None:
    from mxnet.kvstore.kvstore_server import KVStoreServer

    class Server(KVStoreServer):
        def _controller(self) -> Callable[[int, bytes, Any], None]:
            return lambda command, body, _: controller.obey(command, body)

    Server(store).run()


class Controller:
    """Obeys the one command that a server knows; drops and counts all else.

    Parameters
    ----------
    store : KVStore
        The server's.
    rule : CenterRule
    updater : callable
        What is called for each push: the rule, or something around it.
    terms : Terms

    Attributes
    ----------
    dropped : int
        Commands that were not obeyed.
    """

    def __init__(self, store: Any, rule: CenterRule, updater: Updater, terms: Terms) -> None:
        self._store, self._rule, self._updater = store, rule, updater
        self._generation, self._secret = terms.generation, bytes.fromhex(terms.secret)
        self.dropped = 0

    def obey(self, command: int, text: bytes) -> None:
        """Set the rule and begin to add up; an exception could not leave MXNet's callback."""
        from .rule import COMMAND, decode

        try:
            if command != COMMAND:
                raise ValueError("no such number")
            body = verify(self._secret, self._generation, text)
            self._rule.outer = decode(body.encode())
        except (ValueError, RecursionError) as error:
            self._drop(command, len(text), error)
            return
        self._store._set_updater(self._updater)
        _log.info("server %d adds up, %s", self._store.rank, self._rule.outer)

    def _drop(self, command: int, size: int, error: Exception) -> None:
        self.dropped += 1
        is_power_of_two = self.dropped & (self.dropped - 1) == 0
        if self.dropped <= _ALL_LOGGED or is_power_of_two:
            told = self._store.rank, command, size, error, self.dropped
            _log.error(
                "server %d: command %d of %d bytes was dropped: %s; %d dropped so far", *told
            )


def main(argv: Sequence[str]) -> None:
    """Run the role that the only argument names."""
    if len(argv) != 1:
        raise SystemExit("usage: python -m gluon_esgd.center.server scheduler|server")
    try:
        serve(argv[0])
    except ValueError as error:
        raise SystemExit(f"gluon_esgd.center.server: {error}") from None
    os._exit(0)  # MXNet's own way out would wait at a barrier for clients that are gone


if __name__ == "__main__":
    main(sys.argv[1:])
