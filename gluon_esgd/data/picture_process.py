"""A process that reads pictures for `picture_pool`, until its connection ends."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from .picture import read_picture

__all__ = ["main"]


def main() -> None:
    """Answer each list of paths with what `read_picture` says of them."""
    fd, resize, quality = map(int, sys.argv[1:])
    connection = Connection(fd)
    try:
        connection.send("ready")
        while True:
            paths = connection.recv()
            connection.send([read_picture(path, resize or None, quality) for path in paths])
    except (EOFError, ConnectionError):  # whoever asked has ended
        return


if __name__ == "__main__":
    main()
