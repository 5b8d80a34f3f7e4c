"""A server that is slow on purpose: ``slow_server.py SECONDS scheduler|server``.

It takes SECONDS longer for each key pushed to it, and pulls wait behind that.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Callable

from gluon_esgd.center.server import serve

DELAY_S = float(sys.argv[1])


def slow(updater: Callable[..., None]) -> Callable[..., None]:
    def wait(key: Any, received: Any, stored: Any) -> None:
        time.sleep(DELAY_S)
        updater(key, received, stored)

    return wait


if __name__ == "__main__":
    serve(sys.argv[2], wrap=slow)
    os._exit(0)
