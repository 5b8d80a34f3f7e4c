"""The rest of an epoch: a loader without the batches that were done already."""

from __future__ import annotations

from itertools import islice
from typing import Any, Iterator, Optional

import numpy as np
from mxnet.gluon.data import BatchSampler, DataLoader

__all__ = ["batch_size_of", "rest_of"]


def batch_size_of(loader: Any) -> Optional[int]:
    """Return the samples in each full batch of `loader`; None where it does not say."""
    if isinstance(loader, DataLoader):
        batches = loader._batch_sampler
        batches = batches.batches if isinstance(batches, _Rest) else batches
        # Samplers that put together what is of one length have batches of other sizes.
        size = batches._batch_size if type(batches) is BatchSampler else None
    else:
        size = getattr(loader, "batch_size", None)
    return int(size) if isinstance(size, (int, np.integer)) and size > 0 else None


def rest_of(loader: Any, done: int) -> Iterator[Any]:
    """Return an iterator over `loader` after its first `done` batches.

    A ``DataLoader`` does not load them; of anything else they are made and dropped.
    """
    if done and type(loader) is DataLoader:
        loader.clean()  # what it has made ready begins with the first batch
        loader._batch_sampler = _Rest(loader._batch_sampler, done)
        return iter(loader)
    batches: Iterator[Any] = iter(loader)
    for _ in islice(batches, done):
        pass
    return batches


class _Rest:
    """A batch sampler whose next iteration lacks the first `done` batches."""

    def __init__(self, batches: Any, done: int) -> None:
        self.batches = batches
        # At once: random numbers are those of the epoch's start now, and not later.
        self._rest: Optional[Iterator[Any]] = iter(batches)
        for _ in islice(self._rest, done):
            pass

    def __iter__(self) -> Iterator[Any]:
        rest, self._rest = self._rest, None
        return iter(self.batches) if rest is None else rest

    def __len__(self) -> int:
        return len(self.batches)
