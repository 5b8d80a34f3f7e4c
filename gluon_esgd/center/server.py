"""Scheduler and server of the center: ``python -m gluon_esgd.center.server scheduler|server``.

MXNet's own roles, but with a controller of ours. The stock server unpickles an
optimizer from the network; this one obeys one command, of a fixed form, and
moves the center by what it is sent (`rule`). It logs on standard output and
ends on SIGTERM; the terminal's SIGINT, meant for the training processes,
leaves it alone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Callable, Sequence

from .. import settings
from . import pslite

if TYPE_CHECKING:
    from .rule import CenterRule

__all__ = ["main", "serve"]

Updater = Callable[[Any, Any, Any], None]

_log = logging.getLogger("gluon_esgd.center.server")


def _as_it_is(updater: Updater) -> Updater:
    return updater


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
    if role not in ("scheduler", "server"):
        raise ValueError(f"role={role!r} must be 'scheduler' or 'server'")
    job = settings.read()
    if job.scheduler is None or job.num_servers < 1:
        raise ValueError(
            f"a {role} needs GLUON_ESGD_SCHEDULER (host:port; got {job.scheduler}) and "
            f"GLUON_ESGD_NUM_SERVERS of at least 1 (got {job.num_servers}); "
            "'gluon-esgd run' sets them"
        )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s")
    for name in pslite.variables(os.environ):
        del os.environ[name]
    import mxnet as mx

    from .rule import CenterRule

    pslite.set_role(role, job.scheduler, job.num_clients, job.num_servers)
    _log.info(
        "%s, pid %d: scheduler at %s, %d clients, %d servers",
        role, os.getpid(), job.scheduler, job.num_clients, job.num_servers,
    )  # fmt: skip
    rule = CenterRule(job.num_servers)
    _run(mx.kv.create("dist"), rule, wrap(rule))


def _run(store: Any, rule: CenterRule, updater: Updater) -> None:
    from mxnet.kvstore.kvstore_server import KVStoreServer

    class Server(KVStoreServer):
        def _controller(self) -> Callable[[int, bytes, Any], None]:
            return lambda command, body, _: _obey(store, rule, updater, command, body)

    Server(store).run()


def _obey(store: Any, rule: CenterRule, updater: Updater, command: int, body: bytes) -> None:
    """Set the rule; log anything else. An exception could not leave this callback."""
    from .rule import COMMAND, decode

    try:
        if command != COMMAND:
            raise ValueError("no such number")
        rule.outer = decode(body)
    except ValueError as error:
        told = store.rank, command, body[:80], error
        _log.error("server %d: unknown command %d, %r: %s", *told)
        return
    store._set_updater(updater)
    _log.info("server %d adds up, %s", store.rank, rule.outer)


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
