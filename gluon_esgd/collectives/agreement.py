"""The check, made once, that all ranks bring the same to a collective."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Mapping, Sequence

from ..communicator import Communicator

__all__ = ["agree", "by_rank"]


def agree(comm: Communicator, what: str, entries: Sequence[Sequence[Any]]) -> None:
    """Return when every rank brings the same `entries`; collective.

    Parameters
    ----------
    comm : Communicator
    what : str
        What one entry is, for the message ("parameter").
    entries : sequence of sequences
        One for each thing, of what JSON can say, for instance
        ``(name, shape, dtype, grad_req)``.

    Raises
    ------
    ValueError
        On every rank, naming the first difference and the ranks that differ
        from rank 0.
    """
    mine = json.loads(json.dumps([list(entry) for entry in entries]))
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    digests = comm.allgather(digest, f"the check of {what}s")
    if len(set(digests)) == 1:
        return
    plans = comm.allgather(mine, f"the check of {what}s")
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            raise ValueError(
                f"{_difference(what, plans[0], plan, rank)}; all ranks must bring "
                f"the same {what}s in the same order"
            )


def by_rank(said: Mapping[int, Any]) -> str:
    """Return what each rank said as one text, ranks that say the same together."""
    texts = {text: [r for r in said if said[r] == text] for text in said.values()}
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items())


def _difference(what: str, first: Sequence[Any], other: Sequence[Any], rank: int) -> str:
    for i, (a, b) in enumerate(zip(first, other)):
        if a != b:
            return f"{what} {i} differs: rank 0 has {_say(a)}, rank {rank} has {_say(b)}"
    return f"rank 0 has {len(first)} {what}s, rank {rank} has {len(other)}"


def _say(entry: Sequence[Any]) -> str:
    return " ".join(str(tuple(v)) if isinstance(v, list) else str(v) for v in entry)
