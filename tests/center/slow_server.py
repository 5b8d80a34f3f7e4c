"""A server that is slow on purpose: ``slow_server.py SECONDS scheduler|server``.

It takes SECONDS longer for each key pushed to it, and pulls wait behind that.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from gluon_esgd.center.server import accumulate, serve

DELAY_S = float(sys.argv[1])


def slow(key: Any, received: Any, stored: Any) -> None:
    time.sleep(DELAY_S)
    accumulate(key, received, stored)


if __name__ == "__main__":
    serve(sys.argv[2], rule=slow)
    os._exit(0)
