"""A client's checkpoints: the leader writes and reads, all ranks learn what came of it."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

import numpy as np

from ..resume import on_leader
from ..topology import World
from . import choice, folder
from .content import Checkpoint
from .writer import Writer

__all__ = ["Loaded", "Store"]


class Loaded(NamedTuple):
    """A checkpoint's file, on every rank.

    Attributes
    ----------
    path : str
        As the leader calls it.
    data : bytes
    own : bool
        Whether this client wrote it.
    """

    path: str
    data: bytes
    own: bool


class Store:
    """The files of one client; all methods are collective in it.

    Parameters
    ----------
    world : World
    root : str
        The folder of all clients.
    keep : int
    background : bool
    """

    def __init__(self, world: World, root: str, keep: int, background: bool) -> None:
        self._world, self._root, self._keep = world, root, keep
        self.folder = folder.folder_of(root, world.client)
        self._writer = Writer(background)
        self._cleaned = False

    def save(self, make: Callable[[], Checkpoint]) -> str:
        """Let the leader write what `make` returns, and return its path.

        In the background only `make` is waited for.

        Raises
        ------
        OSError, ValueError
            On all ranks of the client: it cannot be made or written.
        """
        path = ""

        def write() -> None:
            nonlocal path
            checkpoint = make()
            if not self._cleaned:
                folder.clean(self.folder)
                self._cleaned = True
            path = folder.next_path(self.folder, checkpoint.epoch, checkpoint.batch)
            self._writer.start(lambda: folder.save(checkpoint, path, self._keep))

        on_leader(self._world, write)
        return str(self._world.broadcast(path))

    def wait(self) -> None:
        """Return when the last one is written.

        Raises
        ------
        OSError
            On all ranks of the client: it could not be written.
        """
        on_leader(self._world, self._writer.finish)

    def load(self, path: Optional[str], rule: str) -> Optional[Loaded]:
        """Return the file at `path`, else of the newest checkpoint, None where nothing was saved.

        See `choice.newest` for `rule`.

        Raises
        ------
        OSError, ValueError
            On all ranks of the client: it cannot be read or is not whole.
        """
        found: Optional[choice.Found] = None

        def read() -> None:
            nonlocal found
            if path is not None:
                found = choice.named(path, self.folder)
            else:
                found = choice.newest(self._root, self._world, rule)

        on_leader(self._world, read)
        said = self._world.broadcast(found and [found.path, len(found.data), found.own])
        if said is None:
            return None
        size = said[1]
        data = np.frombuffer(bytearray(found.data), np.uint8) if found else np.empty(size, np.uint8)
        self._world.control.broadcast(data, "the broadcast of a checkpoint")
        return Loaded(said[0], data.tobytes(), said[2])
