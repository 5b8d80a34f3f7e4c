"""Labels that are not quite sure: smoothing and mixup."""

from __future__ import annotations

from typing import Tuple

import mxnet as mx
import numpy as np

__all__ = ["mixup", "soft_labels"]


def soft_labels(label: mx.nd.NDArray, num_classes: int, smoothing: float = 0.0) -> mx.nd.NDArray:
    """Return probabilities: ``1 - smoothing`` for the label, the rest evenly over all classes.

    Parameters
    ----------
    label : NDArray, shape (samples,)
    num_classes : int
    smoothing : float, default 0
        From 0 to below 1; 0.1 in C. Szegedy et al., https://arxiv.org/abs/1512.00567, section 7.

    Returns
    -------
    NDArray of float32, shape (samples, num_classes)
        For ``SoftmaxCrossEntropyLoss(sparse_label=False)``.

    Raises
    ------
    ValueError
        On this rank: `smoothing` out of range.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing={smoothing!r} must be from 0 to below 1")
    rest = smoothing / num_classes
    return mx.nd.one_hot(label, num_classes, on_value=1 - smoothing + rest, off_value=rest)


def mixup(
    data: mx.nd.NDArray, target: mx.nd.NDArray, alpha: float
) -> Tuple[mx.nd.NDArray, mx.nd.NDArray]:
    """Return a batch mixed with itself, back to front: ``share * x + (1 - share) * reversed x``.

    One share a batch, drawn from Beta(`alpha`, `alpha`) by numpy's global generator, as in H. Zhang
    et al., https://arxiv.org/abs/1710.09412.

    Parameters
    ----------
    data : NDArray, shape (samples, ...)
    target : NDArray, shape (samples, classes)
        Probabilities, as `soft_labels` makes them.
    alpha : float
        Above 0; 0.2 for ImageNet.

    Raises
    ------
    ValueError
        On this rank: an `alpha` that is not above 0.
    """
    if not alpha > 0:
        raise ValueError(f"alpha={alpha!r} must be above 0; leave mixup out for none")
    share = float(np.random.beta(alpha, alpha))
    return _mixed(data, share), _mixed(target, share)


def _mixed(values: mx.nd.NDArray, share: float) -> mx.nd.NDArray:
    return share * values + (1 - share) * mx.nd.reverse(values, axis=0)
