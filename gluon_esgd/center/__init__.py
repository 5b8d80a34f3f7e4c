"""The center between clients: servers hold it, an agent beside each leader fetches it.

The leader uses `CenterLink`, or under the launcher `GenerationLink`, and `Mailbox`; none of them
loads MXNet, for the processes behind them (`zygote`, `agent`, `server`) have things to do before
they do. Without servers the leaders hold the center themselves: `peers`.
"""

from __future__ import annotations

from .face import Box, ExchangeLost, Link
from .generation_link import GenerationLink
from .layout import AVERAGED, CARRIED, MOVED, chunks_of, even_chunks
from .link import CenterLink
from .mailbox import Mailbox
from .servers_link import LinkTerms

__all__ = [
    "AVERAGED",
    "CARRIED",
    "MOVED",
    "Box",
    "CenterLink",
    "ExchangeLost",
    "GenerationLink",
    "Link",
    "LinkTerms",
    "Mailbox",
    "chunks_of",
    "even_chunks",
]
