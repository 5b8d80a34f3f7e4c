"""The center between clients: servers hold it, an agent beside each leader fetches it.

The leader uses `CenterLink` and `Mailbox`; neither loads MXNet. The processes
behind them are `zygote`, `agent` and `server`. Without servers the leaders hold
the center themselves: `PeerLink`, `PeerMailbox`.
"""

from __future__ import annotations

from .face import Box, Link
from .layout import AVERAGED, CARRIED, MOVED, chunks_of, even_chunks
from .link import CenterLink
from .mailbox import Mailbox
from .peer_mailbox import PeerMailbox
from .peers import PeerLink

__all__ = [
    "AVERAGED",
    "CARRIED",
    "MOVED",
    "Box",
    "CenterLink",
    "Link",
    "Mailbox",
    "PeerLink",
    "PeerMailbox",
    "chunks_of",
    "even_chunks",
]
