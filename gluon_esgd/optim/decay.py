"""Which parameters weight decay does not pull at."""

from __future__ import annotations

from mxnet.gluon import ParameterDict

__all__ = ["no_weight_decay"]

_SPARED = ("bias", "gamma", "beta")


def no_weight_decay(params: ParameterDict) -> ParameterDict:
    """Set ``wd_mult`` of biases and of BatchNorm's gamma and beta to 0; return `params`.

    By the last part of their names, as in T. He et al., https://arxiv.org/abs/1812.01187,
    section 3.1. Not collective; the same on all ranks.

    Examples
    --------
    >>> trainer = ElasticTrainer(no_weight_decay(net.collect_params()), "nag",
    ...                          {"wd": 1e-4})                        # doctest: +SKIP
    """
    for name, param in params.items():
        if name.rpartition("_")[2] in _SPARED:
            param.wd_mult = 0.0
    return params
