from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, Tuple

import pytest

from .servers import Job


@pytest.fixture(scope="session")
def job() -> Iterator[Callable[..., Job]]:
    """Return ``job(num_clients, num_servers, sync)``: links that are up, shared by all tests.

    Further options are the links'.
    """
    jobs: Dict[Tuple[Any, ...], Job] = {}

    def get(num_clients: int, num_servers: int, sync: bool = False, **options: Any) -> Job:
        key = (num_clients, num_servers, sync, *sorted(options.items()))
        if key not in jobs:
            limits = {"limit_s": 20.0, "start_timeout_s": 60.0}
            jobs[key] = Job(num_clients, num_servers, sync, **limits, **options)
        return jobs[key]

    yield get
    for one in jobs.values():
        one.close()
