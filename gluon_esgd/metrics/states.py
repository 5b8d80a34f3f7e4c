"""What of a Gluon metric adds up over ranks, so that the sum is the metric over all samples.

Most metrics are the quotient of a sum and a count. F1 and MCC over all batches (``micro``) are
functions of four counts, PCC of a confusion matrix, Pearson's correlation of moments.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import numpy as np
from mxnet import metric as mx_metric

__all__ = ["joined", "state_of"]

State = Dict[str, Any]

_SUMS = ("sum_metric", "num_inst", "global_sum_metric", "global_num_inst")
_COUNTS = ("true_positives", "false_negatives", "false_positives", "true_negatives")
_ALL_COUNTS = (*_COUNTS, *(f"global_{name}" for name in _COUNTS))


def state_of(metric: mx_metric.EvalMetric) -> State:
    """Return what `metric` has gathered, of what JSON can say.

    Raises
    ------
    ValueError
        When its sum or count are no numbers.
    """
    return _kind(metric).take(metric)


def joined(metric: mx_metric.EvalMetric, states: Sequence[State]) -> mx_metric.EvalMetric:
    """Return a copy of `metric` that has gathered what all `states` have."""
    out = copy.copy(metric)
    _kind(metric).put(out, states)
    return out


def _take_sums(metric: Any) -> State:
    return {name: _plain(metric, name) for name in _SUMS}


def _plain(metric: Any, name: str) -> Any:
    """The number, or list of numbers, that an attribute holds."""
    value = getattr(metric, name, 0)
    try:
        array = np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value)
        return (array if array.dtype.kind in "iub" else array.astype(np.float64)).tolist()
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}={value!r} of {type(metric).__name__} must be a number or numbers, to be added "
            "up over ranks"
        ) from None


def _put_sums(metric: Any, states: Sequence[State]) -> None:
    for name in _SUMS:
        total = np.add.reduce([np.asarray(state[name]) for state in states])
        is_list = isinstance(getattr(metric, name, 0), list)
        setattr(metric, name, total.tolist() if is_list or not np.ndim(total) else total)


def _take_counts(metric: Any) -> State:
    counts = vars(_counts_of(metric))
    return {**_take_sums(metric), **{name: int(counts[name]) for name in _ALL_COUNTS}}


def _put_counts(metric: Any, states: Sequence[State]) -> None:
    """As the metric's own update does it, from the counts of all ranks."""
    counts = mx_metric._BinaryClassificationMetrics()
    for name in _ALL_COUNTS:
        setattr(counts, name, sum(state[name] for state in states))
    setattr(metric, "metrics" if hasattr(metric, "metrics") else "_metrics", counts)
    if isinstance(metric, mx_metric.F1):
        scores = counts.fscore, counts.global_fscore
    else:
        scores = counts.matthewscc(), counts.matthewscc(use_global=True)
    metric.num_inst, metric.global_num_inst = counts.total_examples, counts.global_total_examples
    metric.sum_metric = scores[0] * metric.num_inst
    metric.global_sum_metric = scores[1] * metric.global_num_inst


def _counts_of(metric: Any) -> Any:
    return metric.metrics if hasattr(metric, "metrics") else metric._metrics


def _take_matrices(metric: Any) -> State:
    numbers = {name: float(getattr(metric, name)) for name in ("num_inst", "global_num_inst")}
    return {**numbers, "lcm": metric.lcm.tolist(), "gcm": metric.gcm.tolist()}


def _put_matrices(metric: Any, states: Sequence[State]) -> None:
    """Ranks may have met other classes: the largest matrix has room for all."""
    metric.k = max(len(state["lcm"]) for state in states)
    for name in ("lcm", "gcm"):
        total = np.zeros((metric.k, metric.k))
        for state in states:
            k = len(state[name])
            total[:k, :k] += np.reshape(state[name], (k, k))
        setattr(metric, name, total)
    for name in ("num_inst", "global_num_inst"):
        setattr(metric, name, sum(state[name] for state in states))


_MOMENTS = ("_label_nums", "_mean_l", "_mean_p", "_sse_l", "_sse_p", "_conv")


def _take_moments(metric: Any) -> State:
    return {**_take_sums(metric), "moments": [float(getattr(metric, name)) for name in _MOMENTS]}


def _put_moments(metric: Any, states: Sequence[State]) -> None:
    _put_sums(metric, states)
    total = [0.0] * len(_MOMENTS)
    for state in states:
        total = _merged(total, state["moments"])
    for name, value in zip(_MOMENTS, total):
        setattr(metric, name, value)
    metric._pred_nums = metric._label_nums


def _merged(a: List[float], b: List[float]) -> List[float]:
    """Moments of two sets of samples together (Chan, Golub, LeVeque 1979, eq. 2.1)."""
    n = a[0] + b[0]
    if n == 0:
        return a
    mean_l, mean_p, more = b[1] - a[1], b[2] - a[2], a[0] * b[0] / n
    return [
        n,
        a[1] + mean_l * b[0] / n,
        a[2] + mean_p * b[0] / n,
        a[3] + b[3] + mean_l**2 * more,
        a[4] + b[4] + mean_p**2 * more,
        a[5] + b[5] + mean_l * mean_p * more,
    ]


class _Kind(NamedTuple):
    """How the state of a metric is read, and made of those of all ranks."""

    take: Callable[[Any], State]
    put: Callable[[Any, Sequence[State]], None]


def _kind(metric: mx_metric.EvalMetric) -> _Kind:
    micro = "micro" in (getattr(metric, "average", ""), getattr(metric, "_average", ""))
    if isinstance(metric, (mx_metric.F1, mx_metric.MCC)) and micro:
        return _Kind(_take_counts, _put_counts)
    if isinstance(metric, mx_metric.PearsonCorrelation) and micro:
        return _Kind(_take_moments, _put_moments)
    if isinstance(metric, mx_metric.PCC):
        return _Kind(_take_matrices, _put_matrices)
    return _Kind(_take_sums, _put_sums)  # macro: the mean over batches
