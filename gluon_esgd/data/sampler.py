"""The share of each worker in the samples, the same number for all."""

from __future__ import annotations

import logging
from typing import Iterator, Optional, Tuple

import numpy as np
from mxnet.gluon.data import Sampler

from ..job import job
from ..topology import world
from .share import checked_index, checked_share

__all__ = ["ShardSampler"]

_log = logging.getLogger(__name__)

_LAST = ("pad", "drop", "keep")


class ShardSampler(Sampler):
    """Indices of one worker: disjoint, covering, equally many on every worker of the job.

    Unequal numbers are the classical hang: the worker with one more batch waits for
    collectives that the others do not join. All workers draw the same permutation, from
    the seed and the number of the epoch, and take every ``num_workers``-th of it. Not
    collective. It is a ``DataLoader``'s ``sampler=``, or inside a ``BatchSampler`` its
    ``batch_sampler=``; processes that the loader forks do not draw from it.

    Parameters
    ----------
    length : int
        Samples in the whole set: ``len(data)``.
    seed : int, default 0
        From 0 to 2**32 - 1, the same on all workers.
    shuffle : bool, default True
        Another order in each epoch; without, worker k takes k, k + num_workers, ...
    last : {'pad', 'drop', 'keep'}, default 'pad'
        Where the set does not divide: 'pad' repeats at most ``num_workers - 1`` samples,
        'drop' leaves at most as many out, others in each epoch. 'keep' does neither, for
        evaluation: each sample counts once, but some workers have one sample more and
        perhaps one batch more, so no `step` nor other collective may follow each batch.
    num_workers, worker_rank : int, optional
        The workers that share the set and which one this is, both or neither; those of
        the job unless given. ``world().size`` and ``world().rank`` share within a client.

    Attributes
    ----------
    epoch : int
        Epoch of the next iteration; each one moves it on by one, so workers must start
        equally many or call `set_epoch`.

    Raises
    ------
    TypeError, ValueError
        Where the argument is wrong: not an integer, out of range, or no sample for some.

    Examples
    --------
    >>> sampler = ShardSampler(10, seed=1, last="drop", num_workers=3, worker_rank=0)
    >>> len(list(sampler)), sampler.epoch
    (3, 1)
    """

    def __init__(
        self,
        length: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        last: str = "pad",
        num_workers: Optional[int] = None,
        worker_rank: Optional[int] = None,
    ) -> None:
        if hasattr(length, "__len__"):
            raise TypeError(
                f"length={type(length).__name__} must be a number of samples: pass len(data)"
            )
        self._length = checked_index("length", length)
        self._seed = checked_index("seed", seed, below=1 << 32)
        self._workers, self._rank = checked_share(
            ("num_workers", num_workers), ("worker_rank", worker_rank)
        )
        self._follows = num_workers is None
        if last not in _LAST:
            raise ValueError(f"last={last!r} must be one of {', '.join(map(repr, _LAST))}")
        if self._length < (self._workers if last == "drop" else 1):
            raise ValueError(
                f"length={length!r} leaves no sample for some of {self._workers} workers; "
                "use more samples or fewer workers"
            )
        self._shuffle, self._last = shuffle, last
        self.epoch = 0

    def __len__(self) -> int:
        up = {"pad": self._workers - 1, "drop": 0, "keep": self._workers - 1 - self._rank}
        return (self._length + up[self._last]) // self._workers

    def __iter__(self) -> Iterator[int]:
        if self._shuffle:
            order = np.random.RandomState([self._seed, self.epoch]).permutation(self._length)
        else:
            order = np.arange(self._length)
        self.epoch += 1
        order = np.resize(order, len(self) * self._workers)
        return iter(order[self._rank :: self._workers].tolist())

    def share_anew(self) -> Tuple[int, int]:
        """Share the set among the clients that the job has now; collective in the client.

        To be called where an epoch starts, in jobs to which clients may come and from which they
        may go; `TrainingState` does. Clients that learn of a change in different epochs share
        differently for that long: some samples come twice or not at all. A sampler that was
        given its `num_workers` stays as it is, and so does one with ``last='drop'`` that would
        leave some worker no sample.

        Returns
        -------
        tuple of int
            How many clients the job has, and how many of them have lower numbers than this one.
        """
        clients, place = job().clients_now()
        me = world()
        workers = clients * me.size
        if self._follows and self._last == "drop" and self._length < workers:
            if me.is_leader:
                _log.warning(
                    "client %d: %d samples are too few for %d workers; they are shared as before",
                    me.client, self._length, workers,
                )  # fmt: skip
        elif self._follows:
            self._workers, self._rank = workers, place * me.size + me.rank
        return clients, place

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch`, from 0 on, the epoch of the next iteration, as after a resume."""
        self.epoch = checked_index("epoch", epoch, below=1 << 32)
