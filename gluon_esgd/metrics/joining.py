"""Gluon's metrics over all samples that the ranks of a client have seen."""

from __future__ import annotations

import copy
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from mxnet import metric as mx_metric
from mxnet.gluon import Block

from ..topology import world
from .states import joined, state_of

__all__ = ["OverRanks", "evaluate", "over_ranks"]


def over_ranks(metric: mx_metric.EvalMetric) -> Dict[str, float]:
    """Return the values of `metric` over all samples that the ranks of the client have seen.

    Collective in the client; the same on all its ranks. Ranks may have seen different numbers of
    samples, or none; `metric` itself is left as it is.

    Sums and counts are added up; F1, MCC and PearsonCorrelation with ``average='micro'`` and PCC
    are those over all samples. With ``'macro'``, as MAE, MSE and RMSE, they are means over batches,
    here those of all ranks.

    Raises
    ------
    ValueError
        On all ranks: ranks that bring other metrics, or a class of your own that keeps its state
        elsewhere than in ``sum_metric`` and ``num_inst``.
    """
    out: Dict[str, float] = {}
    for names, values in _told(_leaves(metric), "get"):
        out.update(zip(_listed(names), _listed(values)))
    return out


def _told(leaves: Sequence[mx_metric.EvalMetric], get: str) -> List[Tuple[Any, Any]]:
    """What the method `get` of each metric says over all ranks; collective.

    A class whose value does not come from what was joined is refused, on all ranks: their values
    differ then, or they cannot say one.
    """
    told, fault = [], None
    try:
        for leaf in _joined(leaves):
            told.append(getattr(leaf, get)())
    except _Refused:
        raise  # on all ranks
    except Exception as error:
        fault = f"{get}() of {leaves[len(told)].name!r} failed: {error!r}"
    gathered = world().allgather([[repr(value) for value in told], fault], "metrics over ranks")
    _raise_faults([theirs for _, theirs in gathered])
    for leaf, *values in zip(leaves, *(theirs for theirs, _ in gathered)):
        if len(set(values)) > 1:
            raise _Refused(
                f"{type(leaf).__name__} {leaf.name!r} has a state beside sum_metric and num_inst, "
                "which cannot be joined over ranks; evaluate it on one rank with all samples"
            )
    return told


class _Refused(ValueError):
    """Raised on all ranks."""


def _raise_faults(faults: Sequence[Optional[str]]) -> None:
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise _Refused(f"metrics of rank {rank}: {fault}")


def _joined(leaves: Sequence[mx_metric.EvalMetric]) -> List[mx_metric.EvalMetric]:
    """Copies of `leaves` that have gathered what those of all ranks have; collective."""
    names = [f"{type(leaf).__name__} {leaf.name!r}" for leaf in leaves]
    states, fault = [], None
    try:
        states = [state_of(leaf) for leaf in leaves]
    except Exception as error:  # of a user's class too: others must not wait for this rank
        fault = str(error) if isinstance(error, ValueError) else repr(error)
    gathered = world().allgather([names, states, fault], "metrics over ranks")
    _raise_faults([theirs for _, _, theirs in gathered])
    for rank, (theirs, _, _) in enumerate(gathered):
        if theirs != gathered[0][0]:
            raise _Refused(
                f"rank {rank} has the metrics {theirs}, rank 0 has {gathered[0][0]}; all ranks of "
                "a client must bring the same"
            )
    by_leaf = zip(*(theirs for _, theirs, _ in gathered))
    return [joined(leaf, list(states)) for leaf, states in zip(leaves, by_leaf)]


def _listed(value: Any) -> List[Any]:
    return value if isinstance(value, list) else [value]


def _leaves(metric: mx_metric.EvalMetric) -> List[mx_metric.EvalMetric]:
    if isinstance(metric, mx_metric.CompositeEvalMetric):
        return [leaf for part in metric.metrics for leaf in _leaves(part)]
    return [_plain(metric)]


def _plain(metric: mx_metric.EvalMetric) -> mx_metric.EvalMetric:
    """What `OverRanks` has wrapped, with the same state; other metrics as they are."""
    if not isinstance(metric, OverRanks):
        return metric
    plain: Any = object.__new__(type(metric).__bases__[1])
    plain.__dict__ = metric.__dict__
    return plain


def evaluate(
    net: Block, batches: Iterable[Tuple[Any, Any]], metric: mx_metric.EvalMetric
) -> Dict[str, float]:
    """Return `metric` of `net` over the batches of all ranks of the client.

    Collective in the client. To count each sample once, give each rank its own
    part: ``images[rank::size]``.

    Parameters
    ----------
    net : Block
        The network, one input.
    batches : iterable of (data, label)
        NDArrays of this rank's part; as many as there are.
    metric : EvalMetric
        Reset first.
    """
    metric.reset()
    for data, label in batches:
        metric.update([label], [net(data)])
    return over_ranks(metric)


class OverRanks(mx_metric.EvalMetric):
    """A metric that tells all ranks of the client the same number: that over all their samples.

    Each rank updates its own part; ``get()`` and its kin are collective in the client, all others
    are not. For whatever decides by a metric, as handlers of Gluon's Estimator do: early
    stopping on one rank alone would leave the others waiting.

    It is of the class of `metric` too and shares its state, so either may be updated or reset. A
    ``CompositeEvalMetric`` comes back as one of metrics that are wrapped.

    Parameters
    ----------
    metric : EvalMetric

    Raises
    ------
    ValueError
        From ``get()``, on all ranks, as from `over_ranks`.

    Examples
    --------
    >>> accuracy = OverRanks(mx.metric.Accuracy())  # doctest: +SKIP
    >>> estimator = Estimator(net, loss, train_metrics=[accuracy], trainer=trainer)
    """

    def __new__(cls, metric: Optional[mx_metric.EvalMetric] = None) -> Any:
        """Make an object of a class that is both; a copy of one comes without `metric`."""
        if metric is None:
            return object.__new__(cls)
        if not isinstance(metric, mx_metric.EvalMetric):
            raise ValueError(f"metric={metric!r} must be an EvalMetric")
        if isinstance(metric, mx_metric.CompositeEvalMetric):
            composite = copy.copy(metric)
            composite.metrics = [OverRanks(part) for part in metric.metrics]
            return composite
        plain = _plain(metric)
        kind = type(f"OverRanks({type(plain).__name__})", (OverRanks, type(plain)), {})
        return object.__new__(kind)

    def __init__(self, metric: mx_metric.EvalMetric) -> None:
        self.__dict__ = metric.__dict__

    def get(self) -> Tuple[str, float]:
        """Return name and value over all ranks; collective in the client."""
        return _told([_plain(self)], "get")[0]

    def get_global(self) -> Tuple[str, float]:
        """Return name and value over all ranks since the last full reset; collective."""
        return _told([_plain(self)], "get_global")[0]

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.name!r}"  # the value would be collective
