"""What every link to servers has: a zygote, agents, their log, and mailboxes by name."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple

from .contract import check_contract, own_contract
from .ends import AgentEnd, ZygoteEnd
from .layout import check_chunks, check_exact, check_sizes
from .lifeline import Lifeline
from .mailbox import Mailbox
from .memory import Memory

if TYPE_CHECKING:
    from ..optim import Outer

__all__ = ["LinkTerms", "ServersLink", "full_contract", "new_memory"]


@dataclass(frozen=True)
class LinkTerms:
    """What a link is told of the job; see `CenterLink` for each field."""

    client: int
    num_clients: int
    num_servers: int
    sync: bool
    job_dir: Optional[str] = None
    start_timeout_s: float = 120.0
    limit_s: float = 60.0
    peers_limit_s: float = 600.0
    outer: Optional[Outer] = None
    compression: Optional[str] = None


class ServersLink(ABC):
    """A leader's processes and mailboxes; making it starts the zygote.

    Parameters
    ----------
    terms : LinkTerms
    """

    def __init__(self, terms: LinkTerms) -> None:
        self.client, self.num_servers = terms.client, terms.num_servers
        self.sync, self._num_clients = bool(terms.sync), terms.num_clients
        self.start_timeout_s, self.limit_s = float(terms.start_timeout_s), float(terms.limit_s)
        self.peers_limit_s, self.compression = float(terms.peers_limit_s), terms.compression
        self.outer = None if terms.outer is None else asdict(terms.outer)
        self._job_dir = None if terms.job_dir is None else Path(terms.job_dir)
        self._owner, self._closed = os.getpid(), False
        self._mailboxes: Dict[str, Any] = {}
        self._bytes_of_closed = 0
        self._lifeline = Lifeline()
        self._zygote = self._new_zygote()

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait until `attach` can be called."""

    @abstractmethod
    def attach(
        self,
        name: str,
        sizes: Sequence[int],
        chunks: Sequence[Tuple[int, int]],
        contract: Mapping[str, int],
        exact: Sequence[bool] = (),
    ) -> Mailbox:
        """Make the mailbox of one trainer."""

    @property
    def num_clients(self) -> int:
        """How many clients the job has."""
        return self._num_clients

    @property
    def place(self) -> int:
        """How many of them have lower numbers than this one."""
        return self.client

    @property
    def zygote_pid(self) -> int:
        """Process number of the zygote."""
        return self._zygote.process.pid

    @property
    def bytes_moved(self) -> int:
        """Bytes pushed to and pulled from the servers."""
        return self._bytes_of_closed + sum(m.bytes_moved for m in list(self._mailboxes.values()))

    def _new_zygote(self) -> ZygoteEnd:
        with self._log() as log:
            return ZygoteEnd(self._lifeline, log)

    def _new_agent(self, tag: int, scheduler: str, **members: Any) -> AgentEnd:
        """Ask for an agent; `members` stand in for this client's numbers of the job."""
        terms = {
            "scheduler": scheduler,
            "client": self.client,
            "num_clients": self.num_clients,
            "num_servers": self.num_servers,
            "sync": self.sync,
            "outer": self.outer,
            "compression": self.compression,
            **members,
        }
        log_path = None if self._job_dir is None else str(self._log_path)
        return AgentEnd(self._zygote, terms, tag, log_path, self._fate_s)

    _fate_s = 1.0  # for the zygote to say how an agent ended, which an error then names

    def _checked_memory(
        self,
        name: str,
        sizes: Sequence[int],
        chunks: Sequence[Tuple[int, int]],
        exact: Sequence[bool],
    ) -> Memory:
        if not isinstance(name, str):
            raise TypeError(f"name={name!r} must be a str")
        if not name or not name.isprintable() or name in self._mailboxes:
            taken = ", ".join(sorted(self._mailboxes)) or "none"
            raise ValueError(
                f"name={name!r} must be printable, not empty and not in use (in use: {taken})"
            )
        return new_memory(sizes, chunks, exact)

    def _close_ends(self) -> None:
        self._zygote.close()
        self._lifeline.close()
        for mailbox in list(self._mailboxes.values()):
            mailbox.close()

    # Job folder.

    @property
    def _log_path(self) -> Path:
        assert self._job_dir is not None
        return self._job_dir / "logs" / f"client{self.client}.agent.log"

    @contextlib.contextmanager
    def _log(self) -> Iterator[Optional[IO[bytes]]]:
        if self._job_dir is None:
            yield None
            return
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log_path, "ab") as log:
            yield log


def new_memory(
    sizes: Sequence[int], chunks: Sequence[Tuple[int, int]], exact: Sequence[bool]
) -> Memory:
    """Return memory of a layout that is checked first; ValueError where it is none."""
    plain = check_sizes(sizes)
    cuts = check_chunks(chunks, sum(plain))
    return Memory.create(plain, cuts, check_exact(exact, len(cuts)))


def full_contract(contract: Mapping[str, int], memory: Memory) -> Dict[str, int]:
    """Return `contract`, checked, with what is compared without being asked for."""
    own = own_contract(memory.sizes.tolist(), memory.chunks, memory.exact)
    check_contract(contract, len(own))
    return {**{entry: int(value) for entry, value in contract.items()}, **own}
