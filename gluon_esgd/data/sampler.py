"""The share of each worker in the samples, the same number for all."""

from __future__ import annotations

from typing import Iterator, Optional

import numpy as np
from mxnet.gluon.data import Sampler

from ..topology import world

__all__ = ["ShardSampler"]


class ShardSampler(Sampler):
    """Shuffled indices of one worker: disjoint, covering, equally many on every worker.

    Unequal numbers are the classical hang: the worker with one more batch waits for
    collectives that the others do not join. All workers draw the same permutation, from
    the seed and the number of the epoch, and take every ``num_workers``-th of it. Not
    collective.

    Parameters
    ----------
    length : int
        Samples in the whole set.
    num_workers, worker_rank : int, optional
        The workers that share the set and which one this is; those of the job unless given.
    seed : int, default 0
        The same on all workers.
    last : {'pad', 'drop'}, default 'pad'
        Where the set does not divide: 'pad' repeats at most ``num_workers - 1`` samples,
        'drop' leaves at most as many out, others in each epoch.

    Attributes
    ----------
    epoch : int
        Epoch of the next iteration; each one moves it on by one.

    Examples
    --------
    >>> sampler = ShardSampler(10, num_workers=3, worker_rank=0, last="drop")
    >>> len(list(sampler)), sampler.epoch
    (3, 1)
    """

    def __init__(
        self,
        length: int,
        num_workers: Optional[int] = None,
        worker_rank: Optional[int] = None,
        seed: int = 0,
        last: str = "pad",
    ) -> None:
        self._workers = world().num_workers if num_workers is None else num_workers
        self._rank = world().worker_rank if worker_rank is None else worker_rank
        if not 0 <= self._rank < self._workers:
            raise ValueError(
                f"worker_rank={self._rank!r} must lie from 0 to num_workers - 1 = "
                f"{self._workers - 1}"
            )
        if last not in ("pad", "drop"):
            raise ValueError(f"last={last!r} must be 'pad' or 'drop'")
        if length < (self._workers if last == "drop" else 1):
            raise ValueError(
                f"length={length!r} leaves no sample for some of {self._workers} workers; "
                "use more samples or fewer workers"
            )
        self._length, self._seed, self._last = length, seed, last
        self.epoch = 0

    def __len__(self) -> int:
        up = self._workers - 1 if self._last == "pad" else 0
        return (self._length + up) // self._workers

    def __iter__(self) -> Iterator[int]:
        order = np.random.RandomState([self._seed, self.epoch]).permutation(self._length)
        self.epoch += 1
        mine = np.resize(order, len(self) * self._workers)[self._rank :: self._workers]
        return iter(mine.tolist())

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next iteration, as after a resume."""
        self.epoch = epoch
