"""Fixtures that all tests share."""

from __future__ import annotations

import os
import time
from typing import Iterator, List

import pytest

from gluon_esgd.launch.proc import clean_shared_memory

from .pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Started jobs, shared by all tests of the session."""
    made = Pools()
    yield made
    made.end()


@pytest.fixture(autouse=True, scope="session")
def _nothing_left_in_shared_memory() -> Iterator[None]:
    """Remove what MPI leaves behind where tests kill its ranks under a plain mpiexec."""
    since = time.time()
    yield
    clean_shared_memory(since)


@pytest.fixture(autouse=True)
def _no_variable_leaks() -> Iterator[None]:
    """No test leaves an environment variable behind."""
    before = dict(os.environ)
    yield
    after = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    before.pop("PYTEST_CURRENT_TEST", None)
    assert after == before


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Put tests that need the same job next to each other, so that it is started once."""

    def job(item: pytest.Item) -> str:
        call = getattr(item, "callspec", None)
        return str(call.params.get("shape", "")) if call is not None else ""

    items.sort(key=job)  # stable: within a job the order is that of the files
