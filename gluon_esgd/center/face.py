"""What a trainer needs of a center, whoever holds it: servers, or the leaders themselves."""

from __future__ import annotations

from typing import Callable, Mapping, Optional, Protocol, Sequence, Tuple

import numpy as np

from ..counters import Counters
from ..errors import CenterError

__all__ = ["Box", "ExchangeLost", "Link"]


class ExchangeLost(CenterError):
    """The exchange in flight was lost with its generation of servers; weights stay as they are."""


class Box(Protocol):
    """One trainer's flat weights and its center; see `Mailbox` for what each method does."""

    x: np.ndarray

    @property
    def in_flight(self) -> bool:
        """Whether an exchange was started and its shift not yet collected."""

    @property
    def distance(self) -> float:
        """L2 norm of x minus center over the moved parameters at the last exchange."""

    @property
    def center_version(self) -> int:
        """How many whole centers have arrived here."""

    @property
    def bytes_moved(self) -> int:
        """Bytes that went to and came from where clients meet."""

    def seed(self, seeder: bool, out: np.ndarray, resumed: bool = False) -> bool:
        """Make the seeder's x the center and fetch it; whether it was there before."""

    def start_exchange(
        self, rule: str, alpha: float, kinds: np.ndarray, timeout_s: float = 0.0
    ) -> bool:
        """Start an exchange of x with the center; False where there is none at the moment."""

    def collect(self, out: np.ndarray, timeout_s: float) -> bool:
        """Fetch the shift of the exchange in flight; False if it is late."""

    def pull(self, out: np.ndarray, sync: bool = False, *, limit_s: Optional[float] = None) -> None:
        """Fetch the center as it is now; wait `limit_s` for servers that are being replaced."""

    def last_center(self, out: np.ndarray) -> bool:
        """Copy the last whole center into `out`, asking nobody; False if there is none."""

    def start_reduce(self, start: int, stop: int) -> Callable[[], None]:
        """Start to sum ``x[start:stop]`` over all clients, in place; call the result to finish."""

    def reduce(self, start: int, stop: int) -> None:
        """Sum ``x[start:stop]`` over all clients, in place; all leaders call it in one order."""

    def close(self) -> None:
        """Give it up."""


class Link(Protocol):
    """A leader's way to where clients meet; one per process, shared by all its trainers."""

    num_servers: int
    compression: Optional[str]

    @property
    def num_clients(self) -> int:
        """How many clients the job has."""

    @property
    def place(self) -> int:
        """How many of them have lower numbers than this one."""

    def wait_ready(self) -> None:
        """Wait until `attach` can be called."""

    def attach(
        self,
        name: str,
        sizes: Sequence[int],
        chunks: Sequence[Tuple[int, int]],
        contract: Mapping[str, int],
        exact: Sequence[bool] = (),
    ) -> Box:
        """Make the box of one trainer; all leaders make the same ones in the same order."""

    def report(self, step: int, counters: Counters) -> None:
        """Tell whoever watches the job how far this client is."""

    def close(self) -> None:
        """Give it up, with all its boxes."""
