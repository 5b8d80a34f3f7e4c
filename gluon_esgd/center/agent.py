"""The agent: the only process of a client that holds a KVStore.

A KVStore cannot be given up: a pull from a dead server never returns, and
ps-lite ends its process on many faults. So it lives in a process that the
leader can drop at any time by closing a socket. The main thread obeys one
command after the other, but that rounds of rule ``sgd`` go on beside each other
(`rounds_in_flight`); one thread reads commands and ends the process at end
of file, another ends it when the leader is gone.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import traceback
from typing import Any, Callable, Dict, List, Mapping, Tuple

from . import lifeline, wire
from .memory import Memory
from .rounds_in_flight import RoundsInFlight
from .store import Store, StoredVector

__all__ = ["Agent", "run"]

Request = Tuple[Dict[str, Any], List[int]]


class Agent:
    """Obeys the leader's requests: each has a ticket, and is answered once.

    Parameters
    ----------
    store : Store
        The KVStore of this process.
    rounds : RoundsInFlight
    say : callable
        Takes answers; called by any thread.
    """

    def __init__(
        self, store: Store, rounds: RoundsInFlight, say: Callable[[Dict[str, Any]], None]
    ) -> None:
        self._store, self._rounds, self._say = store, rounds, say
        self._vectors: Dict[str, StoredVector] = {}
        self._commands: Mapping[str, Callable[..., None]] = {
            "attach": self._attach,
            "detach": self._detach,
            "seed": lambda name, seeder: self._vectors[name].seed(seeder),
            "exchange": lambda name, **how: self._vectors[name].exchange(**how),
            "fill": lambda name: self._vectors[name].fill(),
            "restore": lambda name: self._vectors[name].restore(),
            "pull": self._pull,
        }

    def obey(self, request: Mapping[str, Any], fds: List[int]) -> None:
        """Run one request and answer it, with an error's text if there was one.

        A round is begun; it is answered at its end.
        """
        answer: Dict[str, Any] = {"ticket": request["ticket"]}
        try:
            fields = dict(request["fields"], **({"fds": fds} if fds else {}))
            if request["command"] == "reduce":
                self._start_reduce(lambda: self._say(answer), **fields)
                return
            self._rounds.wait()
            self._commands[request["command"]](**fields)
        except Exception as error:
            traceback.print_exc()
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            answer["error"] = f"{kind}{error}"
        self._say(answer)

    def _start_reduce(self, answer: Callable[[], None], name: str, first: int, last: int) -> None:
        self._vectors[name].start_reduce(self._rounds, first, last, answer)

    def _attach(self, name: str, contract: Mapping[str, int], fds: List[int]) -> None:
        memory = Memory(fds[0])
        memory.close()  # the mapping stays
        self._vectors[name] = StoredVector(self._store, memory, contract)

    def _detach(self, name: str) -> None:
        del self._vectors[name]

    def _pull(self, name: str, sync: bool, rebase: bool) -> None:
        vector = self._vectors[name]
        vector.pull_together() if sync else vector.pull()
        if rebase:
            vector.rebase()


def run(sock: socket.socket, lifeline_fd: int, terms: Mapping[str, Any]) -> None:
    """Be an agent under `terms`, the arguments of `Store`; never returns."""
    lifeline.watch(lifeline_fd)
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sock, requests), name="reader", daemon=True).start()
    who = f"agent of client {terms['client']}, pid {os.getpid()}"
    print(f"{who}: scheduler at {terms['scheduler']}", flush=True)
    rounds = RoundsInFlight(terms["num_servers"])
    agent = Agent(Store(**terms), rounds, lambda answer: wire.send(sock, answer))
    print(f"{who}: store is up", flush=True)
    wire.send(sock, {"ticket": wire.READY, "pid": os.getpid()})
    while True:
        agent.obey(*requests.get())


def _read(sock: socket.socket, requests: queue.SimpleQueue[Request]) -> None:
    """Queue what arrives. At its end leave at once: the main thread may be stuck for ever."""
    try:
        while True:
            requests.put(wire.receive(sock))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
