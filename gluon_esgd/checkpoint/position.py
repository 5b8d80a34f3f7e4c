"""How far a rank has come in an epoch, in batches of another size."""

from __future__ import annotations

import logging
from typing import Optional

from ..topology import World
from .together import raise_together

__all__ = ["counted_in"]

_log = logging.getLogger(__name__)


def counted_in(
    world: World, epoch: int, batch: int, saved: Optional[int], size: Optional[int]
) -> int:
    """Return how many batches of `size` samples `batch` batches of `saved` samples are.

    Collective in the client, in the job where one MPI job is split.

    Parameters
    ----------
    world : World
    epoch, batch : int
        Where this rank goes on.
    saved, size : int or None
        Samples in a batch, then and now; None where the loader does not say.

    Raises
    ------
    ValueError
        On all ranks of these: `size` does not divide the samples that were done on some rank.
    """
    fault, found = None, batch
    try:
        found = _batches_done(batch, saved, size, epoch)
    except ValueError as error:
        fault = str(error)
    raise_together(world, fault)
    if world.is_leader and found != batch:
        _log.warning(
            "client %d goes on in epoch %d after batch %d of %s samples, which were %d of %s",
            world.client, epoch, found, size, batch, saved,
        )  # fmt: skip
    return found


def _batches_done(batch: int, saved: Optional[int], size: Optional[int], epoch: int) -> int:
    if saved is None or size is None or saved == size:
        return batch
    samples = batch * saved
    if samples % size:
        raise ValueError(
            f"batch_size={size}: epoch {epoch} was left after {batch} batches of {saved}, and "
            f"these {samples} samples are no whole number of batches of {size}: some would come "
            f"twice or not at all. End this epoch with batch_size={saved}, or with another one "
            f"that divides {samples}; the next epoch takes any"
        )
    return samples // size
