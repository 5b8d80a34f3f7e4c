"""Where an optimizer of MXNet breaks with several copies of the weights, or with exchanges.

An exchange adds a shift to the weights (to their fp32 masters, see `masters`) and leaves all
other state as it is. Most optimizers do not notice. This module knows those that do:

- ``Ftrl`` and ``FTML`` compute the weight anew from their state: the shift would be lost.
- ``DCASGD`` keeps the weight that its last update started from, and takes the difference to the
  weight for its own movement. An exchange moves that copy too (`weight_copies`).
- ``SGLD`` adds noise that each copy of the weights draws for itself.
- ``LBSGD`` may keep sums of gradients, by parameter but not by device.

Numbers that an optimizer changes in an update (``Nadam.m_schedule``) are looked after in `devices`.
"""

from __future__ import annotations

from typing import Any, List, Optional

import mxnet as mx
from mxnet.optimizer import DCASGD, FTML, LBSGD, SGLD, Ftrl, Optimizer

__all__ = ["check_optimizer", "weight_copies"]


def check_optimizer(
    optimizer: Optimizer, rule: str, *, size: int, num_clients: int, num_devices: int
) -> None:
    """Raise ValueError where `optimizer` cannot do what is asked of it.

    Subclasses share the limits of the class that they extend.

    Parameters
    ----------
    optimizer : Optimizer
    rule : str
        The rule between clients.
    size : int
        Ranks of a client.
    num_clients : int
    num_devices : int
        Devices of a rank.

    Raises
    ------
    ValueError
        Naming the optimizer, the reason and the way out.
    """
    reason = None
    if rule != "sgd" and isinstance(optimizer, (Ftrl, FTML)):
        reason = (
            f"computes its weights anew from its own state, so an exchange under rule={rule!r} "
            "would be lost at the next step; use rule='sgd' or another optimizer"
        )
    elif isinstance(optimizer, SGLD):
        reason = _noise(rule, size, num_clients, num_devices)
    elif num_devices > 1 and isinstance(optimizer, LBSGD):
        reason = _sums(optimizer, num_devices)
    if reason is not None:
        raise ValueError(f"optimizer {_name(optimizer)} {reason}")


def _name(optimizer: Optimizer) -> str:
    """What the script calls it, and what it extends where that is another class."""
    own = type(optimizer)
    name = repr(own.__name__.lower())
    if own.__module__.startswith("mxnet."):
        return name
    base = next(c for c in own.__mro__ if c.__module__.startswith("mxnet."))
    return f"{name} (a subclass of {base.__name__})"


def _noise(rule: str, size: int, num_clients: int, num_devices: int) -> Optional[str]:
    clients = num_clients if rule == "sgd" else 1
    if size * clients * num_devices == 1:
        return None
    return (
        "draws its own noise for every copy of the weights, so copies that must be equal would "
        f"part: here {size} rank(s) in a client, {clients} client(s) in lockstep, {num_devices} "
        "device(s) in a rank; use one of each (rule='esgd' or 'asgd' between clients) or another "
        "optimizer"
    )


def _sums(optimizer: LBSGD, num_devices: int) -> Optional[str]:
    if optimizer.batch_scale == 1 and optimizer.lr_scheduler is None:
        return None
    return (
        f"keeps sums and counts that its devices share, so the weights of {num_devices} devices in "
        "a rank would part; use one device in each rank, or batch_scale=1 and no lr_scheduler"
    )


def weight_copies(optimizer: Optimizer, state: Any) -> List[mx.nd.NDArray]:
    """Return the arrays in a parameter's `state` that have to move with its weight."""
    if not isinstance(optimizer, DCASGD) or state is None:
        return []
    while isinstance(state, (tuple, list)):  # (momentum, copy), or (master, (momentum, copy))
        state = state[-1]
    return [state]
