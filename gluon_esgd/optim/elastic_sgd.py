"""`ElasticSGD`: MXNet's SGD or NAG that also carries the settings of an exchange."""

from __future__ import annotations

from typing import Any, Optional

import mxnet as mx
from mxnet.optimizer import NAG, SGD

__all__ = ["ElasticSGD", "is_nesterov"]


@mx.optimizer.register
class ElasticSGD(SGD):
    """SGD with momentum, and how the client that it trains meets the center.

    The update is that of ``mxnet.optimizer.SGD`` to the bit, or of
    ``mxnet.optimizer.NAG`` with ``nesterov=True``. Registered, so
    ``ElasticTrainer(params, 'elasticsgd', {...})`` works. Momentum is never
    touched by an exchange.

    Parameters
    ----------
    momentum : float, default 0
    nesterov : bool, default False
    interval : int, optional
        Optimizer steps between two exchanges.
    alpha : float, optional
        Moving rate; or `beta`, with ``alpha = beta / max(2, num_clients)``.
    beta : float, optional
    **kwargs
        As for ``mxnet.optimizer.SGD``: learning_rate, lr_scheduler, wd,
        clip_gradient, multi_precision, lazy_update, ...

    Raises
    ------
    ValueError
        When both `alpha` and `beta` are given, or `interval` is below 1.
    """

    def __init__(
        self,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        interval: Optional[int] = None,
        alpha: Optional[float] = None,
        beta: Optional[float] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(momentum=momentum, **kwargs)
        if alpha is not None and beta is not None:
            raise ValueError(f"give alpha={alpha!r} or beta={beta!r}, not both")
        if interval is not None and (interval != int(interval) or interval < 1):
            raise ValueError(f"interval={interval!r} must be an integer of at least 1")
        self.nesterov = nesterov
        self.interval = interval
        self.alpha = alpha
        self.beta = beta

    def _update_impl(
        self, indices: Any, weights: Any, grads: Any, states: Any, multi_precision: bool = False
    ) -> None:
        if not self.nesterov:
            super()._update_impl(indices, weights, grads, states, multi_precision)
            return
        if not isinstance(indices, (tuple, list)):
            indices, weights, grads, states = [indices], [weights], [grads], [states]
        for item in zip(indices, weights, grads, states):
            NAG._update_impl(self, *item, multi_precision=multi_precision)


def is_nesterov(optimizer: mx.optimizer.Optimizer) -> bool:
    """Whether `optimizer` updates with MXNet's kernels of NAG."""
    if isinstance(optimizer, ElasticSGD):
        return bool(optimizer.nesterov)
    return isinstance(optimizer, NAG)
