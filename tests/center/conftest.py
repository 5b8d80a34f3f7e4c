from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, Tuple

import pytest

from .servers import Job
from .shared import SharedZygote


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedZygote]:
    """Return what forks servers and agents of tests that do not look at their processes."""
    shared = SharedZygote(tmp_path_factory.mktemp("servers"))
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def job(zygote: SharedZygote) -> Iterator[Callable[..., Job]]:
    """Return ``job(num_clients, num_servers, sync)``: links that are up, shared by all tests.

    Further options are the links'.
    """
    jobs: Dict[Tuple[Any, ...], Job] = {}

    def get(num_clients: int, num_servers: int, sync: bool = False, **options: Any) -> Job:
        key = (num_clients, num_servers, sync, *sorted(options.items()))
        if key not in jobs:
            limits = {"limit_s": 20.0, "start_timeout_s": 60.0}
            jobs[key] = zygote.job(num_clients, num_servers, sync=sync, **limits, **options)
        return jobs[key]

    yield get
    for one in jobs.values():
        one.close()
