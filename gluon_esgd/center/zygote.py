"""A process that has imported MXNet, never makes a KVStore, and forks those that do.

``python -m gluon_esgd.center.zygote SOCKET_FD LIFELINE_FD``. Importing MXNet is
the price of every start; a fork of this process is ready at once. A leader has
one for its agents, a station one for scheduler and servers. A request is one
datagram: ``{"fork": role, "tag": number, "terms": {...}}`` with the child's
own descriptors, or ``{"kill": tag}``. ``{"tag", "pid"}`` and, at its end,
``{"tag", "status"}`` (as ``os.wait`` gives it) come back. The process ends with
its socket or its leader, and its children with it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, Callable, Dict, List, Mapping, Sequence

from . import lifeline, wire

__all__ = ["Zygote", "main"]

_POLL_S = 0.1


class Zygote:
    """Forks children on request until the socket or the leader is gone.

    Parameters
    ----------
    control : socket
        Connection to the leader.
    lifeline_fd : int
        Lock that the leader holds while it lives.
    roles : mapping of str to callable
        ``role(fds, lifeline_fd, terms)`` is called in the child and does not return.
    """

    def __init__(self, control: socket.socket, lifeline_fd: int, roles: Mapping[str, Any]) -> None:
        self._control, self._lifeline, self._roles = control, lifeline_fd, roles
        self._children: Dict[int, int] = {}  # pid -> tag

    def run(self) -> None:
        """Serve requests; at the end kill and reap the children."""
        try:
            while not lifeline.is_cut(self._lifeline):
                if select.select([self._control], [], [], _POLL_S)[0]:
                    self._obey(*wire.receive(self._control))
                self._reap()
        except (EOFError, OSError):
            pass  # nobody listens any more
        finally:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)
            for pid in self._children:
                os.waitpid(pid, 0)

    def _obey(self, request: Mapping[str, Any], fds: List[int]) -> None:
        if "fork" in request:
            self._fork(request, fds)
        for pid, tag in self._children.items():
            if tag == request.get("kill"):
                os.kill(pid, signal.SIGKILL)

    def _fork(self, request: Mapping[str, Any], fds: List[int]) -> None:
        try:
            pid = os.fork()
            if pid == 0:
                self._be_child(request, fds)
        except OSError:  # no child, whose other end is told by the end of its socket
            traceback.print_exc()
            return
        finally:
            for fd in fds:
                os.close(fd)
        self._children[pid] = request["tag"]
        wire.send(self._control, {"tag": request["tag"], "pid": pid})

    def _be_child(self, request: Mapping[str, Any], fds: List[int]) -> None:
        try:
            self._control.close()
            self._roles[request["fork"]](fds, self._lifeline, request["terms"])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                tag = self._children.pop(pid)
                wire.send(self._control, {"tag": tag, "status": status})


def _agent(fds: List[int], lifeline_fd: int, terms: Mapping[str, Any]) -> None:
    from . import agent

    agent.run(socket.socket(fileno=fds[0]), lifeline_fd, terms)


def _node(role: str) -> Callable[..., None]:
    def be(fds: List[int], _: int, terms: Mapping[str, Any]) -> None:
        from . import server

        fields = dict(terms)
        server.run(role, socket.socket(fileno=fds[0]), fields.pop("log"), fields)

    return be


def main(argv: Sequence[str]) -> None:
    """Leave the leader's core and the terminal's SIGINT, import MXNet, serve."""
    control = socket.socket(fileno=int(argv[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # before MXNet starts its threads
    from . import agent, server  # noqa: F401  (load MXNet, which all children then have)

    roles = {"agent": _agent, **{role: _node(role) for role in server.ROLES}}
    Zygote(control, int(argv[1]), roles).run()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
