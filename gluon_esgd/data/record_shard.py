"""The part of a RecordIO file that a worker reads, in as many batches as every other worker."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any, Dict, Iterator, Optional, Tuple

import mxnet as mx

from .records import Path, index_path
from .share import checked_index, checked_share

__all__ = ["EqualBatches", "RecordShard", "end", "record_shard"]


@dataclass(frozen=True)
class RecordShard:
    """One worker's part of a RecordIO file.

    Attributes
    ----------
    path_imgrec, path_imgidx : str
    batch_size : int
    num_parts, part_index : int
        The parts, one for each worker, and which one is this worker's.
    seed : int
    records : int
        In the whole file, as its index says.
    batches_per_epoch : int
        The same on every worker.
    """

    path_imgrec: str
    path_imgidx: str
    batch_size: int
    num_parts: int
    part_index: int
    seed: int
    records: int
    batches_per_epoch: int

    @property
    def arguments(self) -> Dict[str, Any]:
        """What ``mx.io.ImageRecordIter(**shard.arguments, ...)`` and its kin must be given."""
        names = ("path_imgrec", "path_imgidx", "batch_size", "num_parts", "part_index", "seed")
        return {name: getattr(self, name) for name in names}

    @property
    def part_records(self) -> int:
        """Records in this worker's part."""
        longest = -(-self.records // self.num_parts)
        return min(longest, self.records - self.part_index * longest)

    def each_once(self, reader: mx.io.DataIter) -> Iterator[Tuple[mx.nd.NDArray, mx.nd.NDArray]]:
        """Yield data and label of each record of the part once, for evaluation.

        Workers may yield unequal numbers of batches: no collective may follow each of them.

        Parameters
        ----------
        reader : DataIter
            One of MXNet's for this part, made anew for each evaluation: a reset does not
            rewind it where it had filled up its last batch. Its ``batch.pad`` is not looked
            at either: the reader's threads may have set it for another batch.
        """
        left = self.part_records
        while left > 0:
            batch = reader.next()
            count = min(left, self.batch_size)
            yield batch.data[0][:count], batch.label[0][:count]
            left -= count
        end(reader)


def end(reader: mx.io.DataIter) -> None:
    """Ask a reader that has come to its end for one more: else its last batch is never freed."""
    with contextlib.suppress(StopIteration):
        reader.next()


def record_shard(
    path_imgrec: Path,
    path_imgidx: Optional[Path] = None,
    *,
    batch_size: int,
    seed: int = 0,
    last: str = "pad",
    num_parts: Optional[int] = None,
    part_index: Optional[int] = None,
) -> RecordShard:
    """Say which part of a RecordIO file this worker reads, and in how many batches.

    MXNet cuts the file into runs of ``ceil(records / num_parts)``, so the last part is
    shorter, and a worker alone cannot know how many batches the others have. The count comes
    from the index instead; `EqualBatches` keeps to it. Not collective.

    Parameters
    ----------
    path_imgrec, path_imgidx : str or path-like
        The file and its index; the index is looked for beside it unless given.
    batch_size : int
        Of each worker.
    seed : int, default 0
        For MXNet's shuffling, the same on all workers.
    last : {'pad', 'drop'}, default 'pad'
        'pad': an epoch takes each part to its end, in full batches, and repeats some records.
        'drop': ``records // (num_parts * batch_size)`` batches, the rest comes first in the
        next epoch; the last, shorter part may still repeat some.
    num_parts, part_index : int, optional
        Both or neither; the workers of the job unless given.

    Raises
    ------
    FileNotFoundError
        If there is no file or no index.
    TypeError, ValueError
        For a wrong argument; on all workers alike if the last part is less than a batch.

    Examples
    --------
    >>> shard = record_shard("train.rec", batch_size=64)                # doctest: +SKIP
    >>> reader = mx.io.ImageRecordIter(**shard.arguments, shuffle=True,
    ...                                data_shape=(3, 224, 224))        # doctest: +SKIP
    >>> batches = EqualBatches(reader, shard.batches_per_epoch)         # doctest: +SKIP
    """
    path_imgrec = os.fspath(path_imgrec)
    path_imgidx = os.fspath(path_imgidx or index_path(path_imgrec))
    for path in (path_imgrec, path_imgidx):
        if not os.path.isfile(path):
            remedy = "; gluon_esgd.data.write_index makes it" if path == path_imgidx else ""
            raise FileNotFoundError(f"{path} is missing{remedy}")
    with open(path_imgidx, "rb") as file:
        records = sum(1 for _ in file)
    parts, mine = checked_share(("num_parts", num_parts), ("part_index", part_index))
    size = checked_index("batch_size", batch_size)
    batches = _batches(path_imgrec, records, parts, size, last)
    seed = checked_index("seed", seed, below=1 << 31)
    return RecordShard(path_imgrec, path_imgidx, size, parts, mine, seed, records, batches)


def _batches(path: str, records: int, parts: int, size: int, last: str) -> int:
    if size < 1:
        raise ValueError(f"batch_size={size!r} must be at least 1")
    if last not in ("pad", "drop"):
        raise ValueError(f"last={last!r} must be 'pad' or 'drop'")
    longest = -(-records // parts)
    shortest = max(0, records - (parts - 1) * longest)
    if shortest < size:  # MXNet's reader would raise on the last worker only
        raise ValueError(
            f"{path} has {records} records: the last of {parts} parts has {shortest}, and MXNet "
            f"wants a batch of {size} in each; use a smaller batch, fewer workers, or "
            "ImageRecordDataset with ShardSampler"
        )
    return -(-longest // size) if last == "pad" else records // (parts * size)


class EqualBatches(mx.io.DataIter):
    """So many batches of `data_iter` in each epoch, whatever its own length.

    Where it ends early it starts again; where it is cut, the next epoch goes on with what is
    left. All batches are full and ``pad`` is 0: what fills up the last one counts as data.
    It differs from ``mx.io.ResizeIter`` in this, and in that an iterator without any batch is an
    error, where that one would end the epoch early on this worker only.

    Parameters
    ----------
    data_iter : DataIter
        ``ImageRecordIter``, ``ImageDetRecordIter`` or any other; it shuffles anew with
        each of its own passes.
    batches : int
        Of an epoch; the same on all workers.

    Raises
    ------
    ValueError
        On this worker, from the iteration, if `data_iter` has no batch at all.
    """

    def __init__(self, data_iter: mx.io.DataIter, batches: int) -> None:
        super().__init__(data_iter.batch_size)
        self._data_iter = data_iter
        self._batches = checked_index("batches", batches)
        self._taken = 0
        self.provide_data = data_iter.provide_data
        self.provide_label = data_iter.provide_label

    def __len__(self) -> int:
        return self._batches

    def reset(self) -> None:
        """Begin the next epoch; `data_iter` goes on where it is."""
        self._taken = 0

    def next(self) -> mx.io.DataBatch:
        """Return the next batch, `batches` times; then StopIteration until `reset`."""
        if self._taken == self._batches:
            raise StopIteration
        self._taken += 1
        for _ in range(2):
            try:
                batch = self._data_iter.next()
            except StopIteration:
                self._data_iter.reset()
            else:
                batch.pad = 0
                return batch
        raise ValueError(f"{type(self._data_iter).__name__} has no batch, also after a reset")
