"""The center between clients: servers hold it, an agent beside each leader fetches it.

The leader uses `CenterLink` and `Mailbox`; neither loads MXNet. The processes
behind them are `zygote`, `agent` and `server`.
"""

from __future__ import annotations

from .layout import AVERAGED, CARRIED, MOVED, chunks_of, even_chunks
from .link import CenterLink
from .mailbox import Mailbox

__all__ = [
    "AVERAGED",
    "CARRIED",
    "MOVED",
    "CenterLink",
    "Mailbox",
    "chunks_of",
    "even_chunks",
]
