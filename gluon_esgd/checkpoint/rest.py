"""The rest of an epoch: a loader without the batches that were done already."""

from __future__ import annotations

from itertools import islice
from typing import Any, Dict, Iterator, Optional

import numpy as np
from mxnet.gluon.data import BatchSampler, DataLoader

from . import random_states

__all__ = ["Rest", "batch_size_of", "rest_of"]


class Rest:
    """What is left of an epoch, with the random numbers that it had on this rank."""

    def __init__(self) -> None:
        self._start: Optional[Dict[str, Any]] = None  # random states at the start of the batches
        self._resumed: Optional[Dict[str, Any]] = None  # what a checkpoint has of this rank

    def resume(self, own: Dict[str, Any]) -> None:
        """Let random numbers go on as in a checkpoint; `own` is what it has of this rank."""
        self._resumed = own
        _go_on(own)

    def of(self, loader: Any, done: int) -> Iterator[Any]:
        """Return an iterator over `loader` after its first `done` batches, as `rest_of`."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["start"] is not None:
            random_states.put(resumed["start"])
        self._start = random_states.read()
        rest = rest_of(loader, done)
        if resumed is not None:
            _go_on(resumed)
        return rest

    def end(self) -> None:
        """Forget the epoch: it is over."""
        self._start = self._resumed = None

    def random_states(self) -> Dict[str, Any]:
        """Return what a checkpoint holds of this rank's random numbers; seeds MXNet's anew."""
        mxnet = random_states.renew_mxnet()
        return {"now": random_states.read(), "start": self._start, "mxnet": mxnet}


def _go_on(own: Dict[str, Any]) -> None:
    random_states.put(own["now"])
    random_states.seed_mxnet(own["mxnet"])


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
