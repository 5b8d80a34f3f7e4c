"""A mailbox of the one agent that its link has: what is lost is an error."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, Optional

import numpy as np

from ..errors import CenterError
from .mailbox import Mailbox
from .memory import Memory

if TYPE_CHECKING:
    from .link import CenterLink

__all__ = ["DirectMailbox"]


class DirectMailbox(Mailbox):
    """A mailbox whose calls raise CenterError when agent or servers are lost."""

    def __init__(self, link: CenterLink, name: str, memory: Memory) -> None:
        super().__init__(name, memory, link.sync)
        self._link = link
        self._ticket: Optional[int] = None
        self._rule = ""
        self._started = 0.0

    @property
    def in_flight(self) -> bool:
        """Whether an exchange was started and its shift not yet collected."""
        return self._ticket is not None

    def _seed(self, seeder: bool, resumed: bool) -> bool:
        self._link._call(
            f"the seed of '{self.name}', for which all {self._link.num_clients} clients must ask",
            self._link.start_timeout_s, "seed", name=self.name, seeder=seeder,
        )  # fmt: skip
        return False

    def _start(self, rule: str, alpha: float, timeout_s: float) -> bool:
        self._started, self._rule = time.monotonic(), rule
        self._ticket = self._link._ask(
            "exchange", name=self.name, rule=rule, alpha=alpha, serial=self._serial
        )
        return True

    def _collect(self, out: np.ndarray, timeout_s: float) -> bool:
        if not self._finished(timeout_s):
            return False
        self._memory.copy_shift(self._rule, out)
        return True

    def _finished(self, timeout_s: float) -> bool:
        """Whether the exchange in flight came back; after an error nothing is in flight."""
        assert self._ticket is not None
        limit_s = self._link.limit_s
        left = max(0.0, self._started + limit_s - time.monotonic())
        try:
            if self._link._answer(self._ticket, min(timeout_s, left)) is None:
                if timeout_s < left:
                    return False
                what = f"an exchange of '{self.name}'"
                self._link._give_up(f"no answer within {limit_s:g} s to {what}")
        except CenterError:
            self._ticket = None
            raise
        self._ticket = None
        return True

    def _pull(self, sync: bool, rebase: bool, limit_s: Optional[float]) -> None:
        together = f", for which all {self._link.num_clients} clients must ask" if sync else ""
        self._link._call(
            f"a pull of '{self.name}'{together}",
            self._link.peers_limit_s if sync else self._link.limit_s,
            "pull", name=self.name, sync=sync, rebase=rebase,
        )  # fmt: skip

    def _start_reduce(self, first: int, last: int, what: str) -> Callable[[], None]:
        ticket = self._link._ask("reduce", name=self.name, first=first, last=last)

        def finish() -> None:
            limit_s = self._link.peers_limit_s
            if self._link._answer(ticket, limit_s) is None:
                clients = f"{self._link.num_clients} clients"
                self._link._give_up(f"no answer within {limit_s:g} s to {what} over {clients}")

        return finish

    def close(self) -> None:
        """Let the agent forget this mailbox; the center stays on the servers. Idempotent."""
        self._link._detach(self)
        self._ticket, self._is_closed = None, True
        self._memory.close()
