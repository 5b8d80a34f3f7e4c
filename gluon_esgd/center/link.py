"""The leader's link to the center: one zygote, one agent, and the mailboxes of its trainers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ..counters import Counters
from ..errors import CenterError, raise_faults
from .direct_mailbox import DirectMailbox
from .servers_link import LinkTerms, ServersLink, full_contract

if TYPE_CHECKING:
    from ..optim import Outer

__all__ = ["CenterLink"]


class CenterLink(ServersLink):
    """A leader's link to the servers; one per process, shared by all its trainers.

    Starts a zygote and asks it for an agent; returns at once. Calls may come from several
    threads. The KVStore lives in the agent, so nothing that happens to scheduler or servers
    can block or end this process: each call raises CenterError when its limit has passed.

    Parameters
    ----------
    scheduler : str
        host:port of the parameter server's scheduler.
    client, num_clients, num_servers : int
        Number of this client, and how many clients and servers the job has.
    sync : bool
        True for rule 'sgd': the servers hand back the sum of each round. False for 'asgd' and
        'esgd': they accumulate what arrives. The same on all clients.
    job_dir : str, optional
        Folder of the job. The agent then logs to ``logs/client{K}.agent.log`` in it, and
        ``state/client{K}.agent`` tells the other leaders that this one has asked for its agent.
    start_timeout_s : float, default 120
        Limit for `wait_ready`, `attach` and `Mailbox.seed`.
    limit_s : float, default 60
        Limit for answers that need only the agent and the servers.
    peers_limit_s : float, default 600
        Limit for calls that all clients make together, who may be at different steps:
        `Mailbox.reduce` and ``Mailbox.pull(sync=True)``.
    outer : Outer, optional
        How exchanges move the center; the same on all clients. Plain sums unless given.
    compression : {'fp16'}, optional
        Half floats to and from the servers, but for chunks that are exact, seeds and pulls; the
        same on all clients.

    Raises
    ------
    ValueError
        Lists every argument that is out of range.
    """

    def __init__(
        self,
        scheduler: str,
        *,
        client: int,
        num_clients: int,
        num_servers: int,
        sync: bool,
        job_dir: Optional[str] = None,
        start_timeout_s: float = 120.0,
        limit_s: float = 60.0,
        peers_limit_s: float = 600.0,
        outer: Optional[Outer] = None,
        compression: Optional[str] = None,
    ) -> None:
        counts = {"client": client, "num_clients": num_clients, "num_servers": num_servers}
        limits = {
            "start_timeout_s": start_timeout_s,
            "limit_s": limit_s,
            "peers_limit_s": peers_limit_s,
        }
        raise_faults("center link", [*_faults(scheduler, **counts), *_limit_faults(limits)])
        super().__init__(
            LinkTerms(
                client, num_clients, num_servers, sync, job_dir, start_timeout_s, limit_s,
                peers_limit_s, outer, compression,
            )
        )  # fmt: skip
        self.scheduler = scheduler
        self._lock = threading.Lock()
        self._asked_at = time.monotonic()
        if self._job_dir is not None:
            (self._job_dir / "state").mkdir(parents=True, exist_ok=True)
            self._roll_call(self.client).touch()
        self._agent = self._new_agent(0, scheduler)

    @property
    def alive(self) -> bool:
        """Whether the agent was not lost, given up or closed so far."""
        return self._agent.lost is None

    @property
    def agent_pid(self) -> int:
        """Process number of the agent; waits until it is up."""
        self.wait_ready()
        return self._agent.pid

    def wait_ready(self) -> None:
        """Wait until the agent's store is up, which needs all agents, all servers, the scheduler.

        Raises
        ------
        CenterError
            If that takes longer than ``start_timeout_s`` since the link was made. The message
            says what was awaited and which clients were seen.
        """
        left = self._asked_at + self.start_timeout_s - time.monotonic()
        if not self._agent.wait_ready(max(0.0, left)):
            self._give_up(
                f"its store was not up within {self.start_timeout_s:g} s; it waits for "
                f"{self.num_clients} clients and {self.num_servers} servers at the scheduler "
                f"{self.scheduler} ({_listening(self.scheduler)}); {self._missing()}"
            )

    def attach(
        self,
        name: str,
        sizes: Sequence[int],
        chunks: Sequence[Tuple[int, int]],
        contract: Mapping[str, int],
        exact: Sequence[bool] = (),
    ) -> DirectMailbox:
        """Make the mailbox of one trainer; all leaders make the same ones in the same order.

        Parameters
        ----------
        name : str
            Prefix of its keys in the store.
        sizes : sequence of int
            Floats of each parameter; n is their sum.
        chunks : sequence of (start, stop)
            How n is cut into keys, see `even_chunks`.
        contract : mapping of str to int
            What must be equal on all clients, checked by `Mailbox.seed`. Absolute values
            below 2**24. Number of floats and cuts are checked without being named here.
        exact : sequence of bool, optional
            For each chunk, whether it travels in float32 and is added up as it is, whatever the
            link's `outer` and `compression`; none unless given.

        Raises
        ------
        CenterError
            If the store is not up, or other clients do not attach theirs in time.
        """
        memory = self._checked_memory(name, sizes, chunks, exact)
        try:
            everything = full_contract(contract, memory)
            self.wait_ready()
            self._call(
                f"the mailbox '{name}', which all {self.num_clients} clients must attach",
                self.start_timeout_s, "attach", [memory.fd], name=name,
                contract=everything,
            )  # fmt: skip
        except BaseException:
            memory.close()
            raise
        mailbox = DirectMailbox(self, name, memory)
        with self._lock:
            self._mailboxes[name] = mailbox
        return mailbox

    def close(self) -> None:
        """End agent and zygote; the center stays on the servers. Idempotent.

        Does nothing in a process that was forked from the leader.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._agent.close()
        self._close_ends()

    def report(self, step: int, counters: Counters) -> None:
        """Do nothing: without stations nobody asks how far a client is."""

    # What mailboxes use.

    def _ask(self, command: str, **fields: Any) -> int:
        return self._agent.ask(command, **fields)

    def _answer(self, ticket: int, timeout_s: float) -> Optional[Dict[str, Any]]:
        return self._agent.answer(ticket, timeout_s)

    def _call(
        self, what: str, limit_s: float, command: str, fds: Sequence[int] = (), **fields: Any
    ) -> None:
        self._agent.call(what, limit_s, command, fds, **fields)

    def _give_up(self, why: str) -> None:
        self._agent.give_up(why)

    def _detach(self, mailbox: DirectMailbox) -> None:
        with self._lock:
            if self._mailboxes.pop(mailbox.name, None) is None:
                return
            self._bytes_of_closed += mailbox.bytes_moved
        with contextlib.suppress(CenterError):  # an agent that is lost has forgotten it already
            self._agent.ask("detach", name=mailbox.name)

    # Job folder.

    def _roll_call(self, client: int) -> Path:
        assert self._job_dir is not None
        return self._job_dir / "state" / f"client{client}.agent"

    def _missing(self) -> str:
        if self._job_dir is None:
            return "without a job_dir it is not known which clients have asked for their agents"
        asked = [self._roll_call(i).exists() for i in range(self.num_clients)]
        seen = ", ".join(str(i) for i, there in enumerate(asked) if there)
        missing = ", ".join(str(i) for i, there in enumerate(asked) if not there) or "none"
        return f"clients that have asked for their agent: {seen}; not seen: {missing}"


def _faults(scheduler: Any, client: Any, num_clients: Any, num_servers: Any) -> List[str]:
    faults = []
    host, _, port = str(scheduler).rpartition(":")
    if not isinstance(scheduler, str) or not host or not port.isdigit() or int(port) >= 65536:
        faults.append(f"scheduler={scheduler!r} must be host:port, as the launcher gives it")
    counts = (("client", client, 0), ("num_clients", num_clients, 1))
    for name, value, least in (*counts, ("num_servers", num_servers, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            faults.append(f"{name}={value!r} must be an integer of at least {least}")
    if not faults and client >= num_clients:
        faults.append(f"client={client} must be below num_clients={num_clients}; count from 0")
    return faults


def _limit_faults(limits: Mapping[str, Any]) -> List[str]:
    return [
        f"{name}={value!r} must be a number of seconds above 0"
        for name, value in limits.items()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0
    ]


def _listening(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError as error:
        return f"where nothing listens: {error}"
    return "which listens"
