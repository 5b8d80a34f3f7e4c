"""What ranks of a client look at each by itself, and must be of one mind about."""

from __future__ import annotations

import threading
from typing import Any, Callable, List, Optional

from ..topology import World

__all__ = ["on_each_machine", "raise_on_all"]

_ROUND_S = 5.0  # ranks hear from those that are at work, so that no limit of waiting is reached


def on_each_machine(me: World, action: Callable[[], None], what: str) -> None:
    """Run `action`, however long it takes, on the client's first rank of each machine.

    Collective in the client. Messages call it `what`.

    Raises
    ------
    OSError, ValueError
        On all ranks of the client, as soon as `action` has failed on one of them.
    """
    failures: List[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            failures.append(error)

    # A daemon: where others have failed nobody waits for it.
    thread = threading.Thread(target=run, name=f"gluon_esgd {what}", daemon=True)
    if me.local_rank == 0:
        thread.start()
    at_work = True
    while at_work:
        if me.local_rank == 0:
            thread.join(timeout=_ROUND_S)
        is_alive = thread.is_alive()
        raise_on_all(me, failures[0] if failures and not is_alive else None, what)
        at_work = any(me.allgather(is_alive, what))


def raise_on_all(me: World, failure: Optional[Exception], what: str) -> None:
    """Raise what failed on a rank, if any, on all; the first rank's where several failed.

    Collective in the client. Messages call it `what`.

    Raises
    ------
    Exception
        On the ranks that failed, `failure`.
    OSError, ValueError
        On the others, with the same text and the rank.
    """
    failed = [(rank, f) for rank, f in enumerate(me.allgather(_said(failure), what)) if f]
    if failure is not None:
        raise failure
    if failed:
        rank, (kind, text) = failed[0]
        raise (OSError if kind == "OSError" else ValueError)(f"rank {rank}: {text}")


def _said(failure: Optional[Exception]) -> Any:
    if failure is None:
        return None
    return ["OSError" if isinstance(failure, OSError) else "ValueError", str(failure)]
