"""A worker's batches of a RecordIO file, epoch by epoch, in an order that can be had again."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Iterator, Optional, Tuple

import mxnet as mx
import numpy as np

from ..job import job
from ..topology import world
from .blame import broken_record
from .record_shard import EqualBatches, RecordShard, end, record_shard
from .records import Path
from .share import checked_index

__all__ = ["PREFETCH", "RecordLoader"]

_log = logging.getLogger(__name__)

# Batches that a reader holds ready: one that is freed leaves all but one of them behind in memory
# (4 by default, 150 MB of 64 pictures of 224 pixels). Beside it the next one is being made.
PREFETCH = 1


class RecordLoader:
    """Equally many batches on every worker, of another part of the file in each epoch.

    MXNet's readers cannot seek, and go on where the last epoch was cut. So each epoch gets a
    reader of its own, whose order and augmentation follow from `seed`, epoch and worker alone: an
    epoch can be gone through again, and a run that goes on inside it drops the batches that were
    done (`TrainingState.batches` does), which costs what reading them costs. Each worker takes
    the next worker's part in the next epoch, so that samples meet others.

    Parameters
    ----------
    path_imgrec : str or path-like
        Its index lies beside it. Best shuffled when it was made, as `pack_folder` does: MXNet
        shuffles inside a part only.
    make_reader : callable
        ``make_reader(path_imgrec=..., path_imgidx=..., batch_size=..., num_parts=...,
        part_index=..., seed=..., seed_aug=..., prefetch_buffer=...)`` returns a ``DataIter``:
        ``functools.partial(mx.io.ImageRecordIter, shuffle=True, ...)``.
    batch_size : int
        Of each worker.
    seed : int, default 0
        The same on all workers.
    last, num_parts, part_index : optional
        As for `record_shard`.

    Attributes
    ----------
    epoch : int
        Epoch of the next iteration; each one moves it on by one.
    shard : RecordShard
        The part of epoch 0.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        As `record_shard`; from the iteration what `make_reader` raises, and a ValueError that
        names a record that cannot be read.
    """

    def __init__(
        self,
        path_imgrec: Path,
        make_reader: Callable[..., mx.io.DataIter],
        *,
        batch_size: int,
        seed: int = 0,
        last: str = "pad",
        num_parts: Optional[int] = None,
        part_index: Optional[int] = None,
    ) -> None:
        self._follows, self._make_reader = num_parts is None, make_reader
        self._cut = partial(record_shard, path_imgrec, batch_size=batch_size, seed=seed, last=last)
        self.shard = self._cut(num_parts=num_parts, part_index=part_index)
        self.epoch = 0

    def __len__(self) -> int:
        return self.shard.batches_per_epoch

    @property
    def batch_size(self) -> int:
        """Samples in each batch of this worker; the order of the samples is the same for any."""
        return self.shard.batch_size

    def __iter__(self) -> Iterator[Tuple[mx.nd.NDArray, mx.nd.NDArray]]:
        """Yield data and label of each batch of the epoch."""
        shard, epoch = self.shard, self.epoch
        self.epoch += 1
        return _batches(self._make_reader, shard, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch`, from 0 on, the epoch of the next iteration, as after a resume."""
        self.epoch = checked_index("epoch", epoch, below=1 << 32)

    def share_anew(self) -> Tuple[int, int]:
        """Share the file among the clients that the job has now; collective in the client.

        As `ShardSampler.share_anew`. A loader that was given its `num_parts` stays as it is, and so
        does one whose last part would be less than a batch.

        Returns
        -------
        tuple of int
            How many clients the job has, and how many of them have lower numbers than this one.
        """
        clients, place = job().clients_now()
        me = world()
        if self._follows:
            try:
                self.shard = self._cut(
                    num_parts=clients * me.size, part_index=place * me.size + me.rank
                )
            except ValueError as error:
                if me.is_leader:
                    _log.warning("client %d shares as before: %s", me.client, error)
        return clients, place


def _batches(
    make_reader: Callable[..., mx.io.DataIter], shard: RecordShard, epoch: int
) -> Iterator[Tuple[mx.nd.NDArray, mx.nd.NDArray]]:
    part = (shard.part_index + epoch) % shard.num_parts
    order, augmentation = _seeds(shard.seed, epoch), _seeds(shard.seed, epoch, 1 + part)
    mine = replace(shard, part_index=part, seed=order)
    reader = make_reader(**mine.arguments, seed_aug=augmentation, prefetch_buffer=PREFETCH)
    for batch in _named(EqualBatches(reader, shard.batches_per_epoch), mine):
        # Its arrays are written anew at the next call, which would wait for all that reads them.
        yield batch.data[0].copy(), batch.label[0].copy()
    end(reader)


def _named(batches: EqualBatches, shard: RecordShard) -> Iterator[mx.io.DataBatch]:
    """Yield batches; where a record cannot be read say which one it is."""
    try:
        yield from batches
    except mx.base.MXNetError as error:
        record = broken_record(shard)
        if record is None:
            raise
        raise ValueError(record) from error


def _seeds(*numbers: Any) -> int:
    """Return a seed for MXNet, below 2**31, which a change of any number changes."""
    return int(np.random.RandomState(list(numbers)).randint(1 << 31))
