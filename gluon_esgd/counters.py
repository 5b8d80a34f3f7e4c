"""What a trainer counts of its own work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Dict

__all__ = ["Counters"]


@dataclass
class Counters:
    """Totals of one trainer in one process since its start; of the last exchange where it says so.

    Attributes
    ----------
    steps : int
        Calls of ``step()`` or ``update()`` that ran.
    collective_bytes : int
        Bytes that this rank gave into collectives (vector sizes, not wire traffic).
    collective_s : float
        Seconds inside collectives, mostly hidden behind the backward pass.
    center_s : float
        Seconds inside exchanges with the center (snapshot, waiting, application), mostly hidden.
    step_wait_s : float
        Seconds for which ``step()`` itself waited.
    exchanges : int
        Exchanges with the center that were applied.
    exchanges_late : int
        Times an exchange was not back when it was due, and was put off.
    exchanges_skipped : int
        Exchanges that did not begin, since there was nothing to exchange with at the moment.
    exchanges_lost : int
        Exchanges that were lost with their servers or agent; the weights stayed as they were.
    staleness : int
        Optimizer steps between snapshot and application of the last exchange (leader only).
    server_bytes : int
        Bytes that this client sent to and received from the servers (leader only); without
        servers the vectors that it gave into collectives between clients.
    distance : float
        L2 norm of client minus center at the last exchange (leader only).
    """

    steps: int = 0
    collective_bytes: int = 0
    collective_s: float = 0.0
    center_s: float = 0.0
    step_wait_s: float = 0.0
    exchanges: int = 0
    exchanges_late: int = 0
    exchanges_skipped: int = 0
    exchanges_lost: int = 0
    staleness: int = 0
    server_bytes: int = 0
    distance: float = 0.0

    def as_dict(self) -> Dict[str, float]:
        """Return the totals by name."""
        return asdict(self)
