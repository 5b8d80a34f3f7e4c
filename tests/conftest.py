"""Fixtures that all tests share."""

from __future__ import annotations

import os
import time
import warnings
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Iterator, List, Optional, Sequence

import pytest

from gluon_esgd.launch.proc import clean_shared_memory

from .pool import Coming, Pools, Shape

# Collectives need no MXNet: their tests run where there are only CuPy and mpi4py.
_WITHOUT_MXNET = ("collectives", "test_communicator.py")
_HAS_MXNET = find_spec("mxnet") is not None
if not _HAS_MXNET:
    collect_ignore = [
        p.name for p in Path(__file__).parent.iterdir() if p.name not in _WITHOUT_MXNET
    ]


def pytest_report_header() -> List[str]:
    """Say what is left out for lack of MXNet."""
    return [] if _HAS_MXNET else [f"no MXNet: only the tests of {', '.join(_WITHOUT_MXNET)}"]


@lru_cache(maxsize=None)
def _no_gpu() -> Optional[str]:
    """Why tests marked `gpu` cannot run here."""
    if find_spec("cupy") is None:
        return "needs a GPU and CuPy, which is not installed"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cupy

            cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"needs a GPU: {str(error).strip().splitlines()[-1]}"
    return None


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Started jobs, shared by all tests of the session."""
    made = Pools()
    yield made
    made.end()


_COMING = pytest.StashKey[Optional[Coming]]()


@pytest.fixture(autouse=True)
def _the_next_job_starts_meanwhile(request: pytest.FixtureRequest) -> None:
    """Tell the pools which job is needed after the one that this test shares with others."""
    if "pools" in request.fixturenames:
        request.getfixturevalue("pools").coming = request.node.stash.get(_COMING, None)


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


def _job(item: pytest.Item) -> Optional[Shape]:
    """The job of a pool that a test shares with others."""
    call = getattr(item, "callspec", None)
    return call.params.get("shape") if call is not None else None


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Put tests that need the same job next to each other, so that it is started once."""
    for item in items:
        reason = _no_gpu() if item.get_closest_marker("gpu") else None
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: str(_job(item) or ""))  # stable: within a job as in the files
    in_pools = (item for item in items if "pools" in item.fixturenames)
    _note_what_comes([item for item in in_pools if isinstance(_job(item), Shape)])


def _note_what_comes(items: Sequence[pytest.Item]) -> None:
    """Let each test know the job of the first one after it that has another."""
    coming: Optional[Coming] = None
    for item, following in zip(reversed(items), [None, *reversed(items)]):
        if following is not None and _job(following) != _job(item):
            coming = Coming(_job(following), following.module.__name__)
        item.stash[_COMING] = coming


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits as IDX files: the machine may have other pictures, and more."""
    from sklearn.datasets import load_digits

    from .data.test_images import NAMES, write

    folder = tmp_path_factory.mktemp("digits")
    found = load_digits()
    images = (found.images * 15).astype("u1")
    for kind, part in ((0, slice(None, -360)), (2, slice(-360, None))):
        write(folder, NAMES[kind], images[part])
        write(folder, NAMES[kind + 1], found.target[part].astype("u1"))
    return folder
