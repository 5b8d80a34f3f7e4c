"""What a checkpoint holds, to a file and from one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any, Dict, List, Optional

import numpy as np

from ..states import Array, States, as_states, as_tree, damaged, read_tree, write_tree

__all__ = ["Checkpoint", "read", "write"]

_KIND = "checkpoint"
_RANK = {"now", "start", "mxnet", "batch", "batch_size"}


@dataclass
class Checkpoint:
    """Where one client stands, plain.

    Attributes
    ----------
    epoch, batch : int
        Epochs done, and batches done of the next one, by the rank that did most.
    num_clients, size : int
        Clients of the job, and ranks of each, that shared the data. 0 clients: their numbers had
        gaps, as those of no job that starts.
    sampler_epoch : int or None
        ``epoch`` of the sampler, where there is one.
    parameters : dict of str to Array
        By name, of the leader's first device.
    statistics : list of list of Array
        Running statistics of each device of each rank: their bytes, one after the other.
    ranks : list of dict
        Of each rank its own ``batch``, the ``batch_size`` of its loader where that said one, and
        ``now`` and, inside an epoch, ``start`` (of the epoch's data), see `random_states`, and
        MXNet's seed.
    states : States
        What the trainer remembers, and where it stands.
    """

    epoch: int
    batch: int
    num_clients: int
    size: int
    sampler_epoch: Optional[int]
    parameters: Dict[str, Array]
    statistics: List[List[Array]]
    ranks: List[Dict[str, Any]]
    states: States


def write(checkpoint: Checkpoint, file: IO[bytes]) -> None:
    """Write `checkpoint`; touches nothing of MXNet."""
    write_tree(file, _KIND, {**vars(checkpoint), "states": as_tree(checkpoint.states)})


def read(data: bytes, name: str) -> Checkpoint:
    """Return the checkpoint in a file's `data`, its checksums checked; runs nothing in it.

    Raises
    ------
    ValueError
        It is none, or damaged.
    """
    if not data:
        raise ValueError(f"{name} is empty: it is no checkpoint file")
    tree = read_tree(data, name, _KIND)
    try:
        return _checked(Checkpoint(**{**tree, "states": as_states(tree["states"])}))
    except Exception as error:
        raise damaged(name, error) from error


def _checked(found: Checkpoint) -> Checkpoint:
    """What is used without a further look has to be of its type."""
    for number in (found.epoch, found.batch, found.num_clients, found.size):
        if type(number) is not int or number < 0:
            raise TypeError(f"{number!r} is no count")
    if found.sampler_epoch is not None and type(found.sampler_epoch) is not int:
        raise TypeError(f"sampler_epoch is {found.sampler_epoch!r}")
    rows = [row for rows in found.statistics for row in rows]
    for array in [*found.parameters.values(), *rows]:
        if not isinstance(array.host, np.ndarray):
            raise TypeError("an array is missing")
    if len(found.ranks) != found.size or len(found.statistics) != found.size:
        raise ValueError(f"not of {found.size} ranks")
    for own in found.ranks:
        if set(own) != _RANK or type(own["batch"]) is not int:
            raise ValueError("what belongs to a rank is missing")
        if own["batch_size"] is not None and type(own["batch_size"]) is not int:
            raise TypeError(f"batch_size is {own['batch_size']!r}")
    return found
