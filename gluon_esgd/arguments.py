"""What a script gives to a trainer, checked."""

from __future__ import annotations

import logging
from typing import Any, List, Optional, Sequence

from mxnet import gluon
from mxnet.kvstore import KVStore

from .topology import World

__all__ = ["check_stores", "checked_batch", "positions"]

_log = logging.getLogger(__name__)

_LARGEST_BATCH = 1 << 24  # sample counts travel as float32


def positions(given: Any, params: Sequence[gluon.Parameter]) -> List[int]:
    """Return where what the script gave is in `params`; Gluon sorts dicts by name."""
    where = {id(param): position for position, param in enumerate(params)}
    return [where[id(p)] for p in (given.values() if hasattr(given, "values") else given)]


def check_stores(world: World, kvstore: Any, update_on_kvstore: Optional[bool]) -> None:
    """Refuse stores that a distributed job cannot use; say what is taken otherwise than meant."""
    if isinstance(kvstore, KVStore) and "dist" in kvstore.type:
        raise ValueError(
            f"kvstore={kvstore.type!r} as an object cannot be used in a distributed job "
            f"({world}): pass its name as a string, or leave kvstore unset"
        )
    if update_on_kvstore and world.is_main:
        _log.warning("update_on_kvstore=True: the optimizer runs on the workers all the same")


def checked_batch(batch_size: Any) -> float:
    """Return `batch_size` as a number of samples, or raise TypeError or ValueError."""
    try:
        samples = batch_size.__float__()  # float() would also read texts
    except (AttributeError, TypeError):
        raise TypeError(f"batch_size={batch_size!r} must be a number of samples") from None
    if not 0 < samples < _LARGEST_BATCH:
        raise ValueError(
            f"batch_size={batch_size!r} must be above 0 and below {_LARGEST_BATCH} samples"
        )
    return samples
