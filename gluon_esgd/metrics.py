"""Averages of the user's own numbers: one value for all ranks of a client, or for the job."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from mxnet import metric as mx_metric
from mxnet.gluon import Block

from .topology import world

__all__ = ["average", "evaluate", "over_ranks", "share_with_main"]

# Their value is not a quotient of two sums over samples.
_NOT_ADDITIVE = (mx_metric.F1, mx_metric.MCC, mx_metric.PearsonCorrelation, mx_metric.PCC)


def average(values: Mapping[str, float], weight: float = 1.0) -> Dict[str, float]:
    """Return the weighted mean of each value over the ranks of the client.

    Collective in the client; the result is the same on all its ranks.

    Parameters
    ----------
    values : mapping of str to float
        The same names on every rank.
    weight : float, default 1
        How much this rank's values count, as a rule its number of samples. The
        values of a rank with weight 0 are ignored; NaN when all weights are 0.

    Raises
    ------
    ValueError
        On all ranks, if names differ over the ranks or a weight is negative.
    """
    mine = {name: float(value) for name, value in values.items()}
    gathered = world().allgather([mine, float(weight)])
    names = sorted(gathered[0][0])
    for rank, (theirs, w) in enumerate(gathered):
        if sorted(theirs) != names:
            raise ValueError(
                f"average: rank {rank} gives {sorted(theirs)}, rank 0 gives {names}; "
                "all ranks of a client must give the same names"
            )
        if not w >= 0:
            raise ValueError(f"average: weight={w!r} of rank {rank} must be 0 or more")
    total = sum(w for _, w in gathered)
    if total == 0:
        return dict.fromkeys(values, math.nan)
    return {name: sum(v[name] * w for v, w in gathered if w) / total for name in values}


def _leaves(metric: mx_metric.EvalMetric) -> List[mx_metric.EvalMetric]:
    if isinstance(metric, mx_metric.CompositeEvalMetric):
        return [leaf for part in metric.metrics for leaf in _leaves(part)]
    return [metric]


def over_ranks(metric: mx_metric.EvalMetric) -> Dict[str, float]:
    """Return the values of `metric` over all samples that the ranks of the client have seen.

    Collective in the client. Sums and counts are added up, so ranks may have seen
    different numbers of samples; `metric` itself is left as it is.

    Raises
    ------
    ValueError
        For metrics that cannot be added up (F1, MCC, Pearson and PCC).
    """
    leaves = [copy.copy(leaf) for leaf in _leaves(metric)]
    for leaf in leaves:
        if isinstance(leaf, _NOT_ADDITIVE):
            raise ValueError(
                f"{type(leaf).__name__} is no mean over samples and cannot be joined over "
                "ranks; evaluate it on one rank with all samples"
            )
    sums = [[float(leaf.sum_metric), int(leaf.num_inst)] for leaf in leaves]
    out = {}
    for leaf, theirs in zip(leaves, zip(*world().allgather(sums))):
        leaf.sum_metric = sum(s for s, _ in theirs)
        leaf.num_inst = sum(n for _, n in theirs)
        out.update(leaf.get_name_value())
    return out


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


def share_with_main(
    values: Mapping[str, float], timeout_s: float = 120.0
) -> List[Optional[Dict[str, float]]]:
    """Leave this client's `values` in the job's folder; the main client gets those of all.

    Collective in the client; all clients call it equally often. They have no other way to each
    other: leaders write ``state/result{N}-client{K}.json``, client 0 waits for them.

    Returns
    -------
    list
        By client; None where nothing came within `timeout_s` (a client that failed, or
        machines that do not share the folder). Clients other than 0 get their own only.
    """
    me, job_dir = world(), world().settings.job_dir
    mine: List[Optional[Dict[str, float]]] = [None] * me.num_clients
    mine[me.client] = dict(values)
    if job_dir is None or me.num_clients == 1:
        return mine
    number = me.broadcast(_calls_before(job_dir, me.client) if me.is_leader else None)
    paths = [_result(job_dir, number, k) for k in range(me.num_clients)]
    if me.is_leader:
        _write_atomically(paths[me.client], json.dumps(dict(values)))
    if me.client != 0:
        return mine
    return me.broadcast(_collect(paths, timeout_s) if me.is_leader else None)


def _result(job_dir: str, number: int, client: int) -> str:
    return os.path.join(job_dir, "state", f"result{number}-client{client}.json")


def _calls_before(job_dir: str, client: int) -> int:
    number = 0
    while os.path.exists(_result(job_dir, number, client)):
        number += 1
    return number


def _write_atomically(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _collect(paths: List[str], timeout_s: float) -> List[Optional[Dict[str, float]]]:
    """Read each of `paths` as it appears; None for those that are not there in time."""
    found: List[Optional[Dict[str, float]]] = [None] * len(paths)
    end = time.monotonic() + timeout_s
    while True:
        for k, path in enumerate(paths):
            if found[k] is None and os.path.exists(path):
                with open(path) as file:
                    found[k] = json.load(file)
        if None not in found or time.monotonic() > end:
            return found
        time.sleep(0.05)
