"""Which checkpoint a client goes on from; on its leader."""

from __future__ import annotations

import logging
from heapq import merge
from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ..topology import World
from .content import Checkpoint, read
from .folder import Entry, before, entries, folder_of, folders_of

__all__ = ["Found", "named", "newest", "same_shares"]

_log = logging.getLogger(__name__)


class Found(NamedTuple):
    """A checkpoint that could be read.

    Attributes
    ----------
    path : str
    data : bytes
        The whole file.
    own : bool
        Whether this client wrote it.
    """

    path: str
    data: bytes
    own: bool


def named(path: str, own_folder: str) -> Found:
    """Return the checkpoint at `path`.

    Raises
    ------
    OSError, ValueError
        It cannot be read, or is damaged; the one before it is named.
    """
    try:
        data = _whole(path)
    except ValueError as error:
        older = before(path)
        hint = f"; the one before it is {older}" if older else "; there is none before it"
        raise ValueError(f"{error}{hint}") from error
    return Found(path, data, any(entry.path == path for entry in entries(own_folder)))


def newest(root: str, world: World, rule: str) -> Optional[Found]:
    """Return what this client goes on from, None where nothing was saved.

    The newest of its own that is whole. A client that has none, and every client of a job that has
    other numbers of clients or ranks now, takes client 0's. Clients of a split job make each step
    together: they take the newest that all of them have.

    Under rule ``sgd`` all clients are alike after each step: they take the one that is furthest,
    whose it ever is; one that was lost and started again then goes on where the others have come.

    Parameters
    ----------
    root : str
        Has a folder for each client.
    world : World
    rule : {'esgd', 'asgd', 'sgd'}

    Raises
    ------
    ValueError
        There are checkpoints, but none is whole.
    """
    mine = entries(folder_of(root, world.client))
    if rule == "sgd":
        return _furthest(root, mine)
    others = [entries(folder_of(root, k)) for k in range(world.num_clients) if k != world.client]
    is_split = world.settings.is_split
    found = _first_whole(_together(mine, others) if is_split else [[entry] for entry in mine])
    restarted = world.settings.life > 0
    if found is not None and (restarted or world.client == 0 or _shared_as_now(found, world)):
        return Found(found.path, found.data, own=True)
    first = _first_whole([entry] for entry in entries(folder_of(root, 0)))
    if first is None or world.client == 0:
        return first
    _log.warning(
        "client %d has no checkpoint of its own from %d clients of %d ranks: it takes %s",
        world.client, world.num_clients, world.size, first.path,
    )  # fmt: skip
    return first


def _furthest(root: str, mine: List[Entry]) -> Optional[Found]:
    """The furthest that is whole, of any client; where several are, that of `mine`."""
    folders = [entries(folder) for folder in folders_of(root)]

    def place(entry: Entry) -> Tuple[int, int, bool, str]:
        return (*entry[1:3], entry in mine, entry.path)

    # Merged by the newest of each: what was gone back behind stays behind.
    found = _first_whole([entry] for entry in merge(*folders, key=place, reverse=True))
    own = found is not None and any(entry.path == found.path for entry in mine)
    return found and Found(found.path, found.data, own)


def same_shares(checkpoint: Checkpoint, num_clients: int, size: int) -> bool:
    """Whether the data were shared by so many clients, and ranks in each."""
    return (checkpoint.num_clients, checkpoint.size) == (num_clients, size)


def _shared_as_now(found: Found, world: World) -> bool:
    return same_shares(read(found.data, found.path), world.num_clients, world.size)


def _together(mine: List[Entry], others: List[List[Entry]]) -> List[List[Entry]]:
    """For those of `mine` that all others have too: the one, and theirs of the same place."""
    groups = []
    for entry in mine:
        theirs = [[e for e in found if e[1:3] == entry[1:3]] for found in others if found]
        if all(theirs):
            groups.append([entry, *(found[0] for found in theirs)])
    return groups


def _first_whole(groups: Iterable[Sequence[Entry]]) -> Optional[Found]:
    """The first of the first group in which all are whole; None where there are no groups."""
    faults = []
    for group in groups:
        try:
            data = [_whole(entry.path) for entry in group]
        except (OSError, ValueError) as error:
            faults.append(str(error))
            _log.warning("%s: looking for the checkpoint before it", error)
            continue
        return Found(group[0].path, data[0], own=False)
    if faults:
        raise ValueError(f"no checkpoint is whole: {'; '.join(faults)}; remove them to start anew")
    return None


def _whole(path: str) -> bytes:
    with open(path, "rb") as file:
        data = file.read()
    read(data, path)
    return data
