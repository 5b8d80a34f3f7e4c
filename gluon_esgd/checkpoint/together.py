"""Faults of a rank are raised on all: nobody waits for one that has stopped."""

from __future__ import annotations

from typing import Optional

import mxnet as mx

from ..resume import on_leader
from ..topology import World

__all__ = ["raise_together"]


def raise_together(world: World, fault: Optional[str]) -> None:
    """Raise what is wrong on any rank; collective in the client, in the job where that is split.

    Parameters
    ----------
    world : World
    fault : str or None
        Of this rank. Where the leader has none, the text names the rank that has.

    Raises
    ------
    ValueError
        On all ranks of the client, of the job where one MPI job is split.
    """
    faults = world.allgather(fault)
    rank, text = next(((k, text) for k, text in enumerate(faults) if text), (0, None))
    text = text if rank == 0 else f"rank {rank}: {text}"

    def compare() -> None:
        mx.nd.waitall()  # leaders have one communicator for engine and main thread
        assert world.leaders is not None
        for client, other in enumerate(world.leaders.allgather(text, "the faults of all clients")):
            if other is not None:
                raise ValueError(other if text is not None else f"client {client}: {other}")

    if world.settings.is_split:
        on_leader(world, compare)
    elif text is not None:
        raise ValueError(text)
