"""How far a rank has come in an epoch, in batches of another size."""

from __future__ import annotations

from typing import Optional

__all__ = ["batches_done"]


def batches_done(batch: int, saved: Optional[int], size: Optional[int], epoch: int) -> int:
    """Return how many batches of `size` samples `batch` batches of `saved` samples are.

    Loaders that do not say their batch size, None, are taken to have the one that they had.

    Raises
    ------
    ValueError
        `size` does not divide the samples that were trained on: some would come twice or not at
        all.
    """
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
