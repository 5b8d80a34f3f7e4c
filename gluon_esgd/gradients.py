"""The gradients of a step: packed in buckets, summed in the engine, scaled to means.

The tail of each bucket carries the rank's sample count and an error mark, so a
rank with a local error still comes to its collective, and nobody waits for it.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Callable, List, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .collectives import allreduce, pack_order
from .communicator import Communicator
from .counters import Counters
from .engine import Lane, view
from .errors import CollectiveError

__all__ = ["TAIL", "GradientReducer", "bucket_sizes"]

TAIL = 2  # sample count, number of ranks with an error
_SAMPLES, _ERRORS = -2, -1

_NAMED = 3  # parameters that an error message names


@dataclass
class _Bucket:
    """Gradients that travel together; `arrays` are those of all devices of this process."""

    number: int
    params: List[Parameter]
    arrays: List[List[mx.nd.NDArray]]
    buffer: np.ndarray

    def __str__(self) -> str:
        names = [p.name for p in self.params]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"gradient bucket {self.number} ({', '.join(names[:_NAMED])}{more})"


def _plan(params: Sequence[Parameter], bucket_bytes: int) -> list:
    sizes = [int(np.prod(p.shape)) for p in params]
    return pack_order(sizes, [np.dtype(p.dtype).name for p in params], bucket_bytes)


def bucket_sizes(params: Sequence[Parameter], bucket_bytes: int) -> List[int]:
    """Return the elements of each bucket of `params` with its tail, in the order of travel."""
    sizes = [int(np.prod(p.shape)) for p in params]
    return [sum(sizes[i] for i in span.indices) + TAIL for span in _plan(params, bucket_bytes)]


class GradientReducer:
    """Makes the gradients of all ranks their mean, without waiting for it.

    Parameters
    ----------
    params : sequence of Parameter
        Those that have gradients, initialized, alike on all ranks.
    comm : Communicator
    lane : Lane
    counters : Counters
    algorithm : str
        Of the collective.
    bucket_bytes : int
    between : callable, optional
        ``between(number, buffer)`` sums bucket `number` over the clients, in
        place; called in the engine on the leader (rule ``sgd``).
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        comm: Communicator,
        lane: Lane,
        counters: Counters,
        *,
        algorithm: str,
        bucket_bytes: int,
        between: Optional[Callable[[int, np.ndarray], None]] = None,
    ) -> None:
        self._params = list(params)
        self._comm, self._lane, self._counters = comm, lane, counters
        self._algorithm, self._bucket_bytes, self._between = algorithm, bucket_bytes, between
        self._buckets: List[_Bucket] = []
        self._step = 0

    @property
    def needed(self) -> bool:
        """Whether there is anything to reduce: another rank, device or client."""
        devices = max((len(p.list_ctx()) for p in self._params), default=1)
        return self._comm.size > 1 or devices > 1 or self._between is not None

    def reduce(
        self, weight: float, scale: float, stale: Sequence[int] = (), error: Optional[str] = None
    ) -> None:
        """Push the collectives of one step; collective over the client's ranks.

        Afterwards, in the engine's order, every gradient is ``scale / W`` times
        the sum over all ranks and devices, where `W` is the sum of all weights.

        Parameters
        ----------
        weight : float
            Samples behind this rank's gradients; with 0 they count as zeros.
        scale : float
            The same on all ranks.
        stale : sequence of int
            Positions in `params` that count as zeros on this rank.
        error : str, optional
            A local error: it is raised on every rank, and no gradient changes.
        """
        self._step += 1
        step, skipped = self._step, {self._params[i].name for i in stale}
        for bucket in self._current():
            arrays = [a for per_device in bucket.arrays for a in per_device]
            staged = [[_on_cpu(a) for a in per_device] for per_device in bucket.arrays]
            views = [[view(a) for a in per_device] for per_device in staged]
            job = _Job(bucket, views, weight, scale, skipped, error, step)
            held = [a for per_device in staged for a in per_device]
            self._lane.push(functools.partial(self._run, job), f"allreduce {bucket}", writes=held)
            for array, copy in zip(arrays, held):
                if copy is not array:
                    copy.copyto(array)

    def _current(self) -> List[_Bucket]:
        """The buckets, laid anew when a gradient array was replaced (cast, reset_ctx, ...)."""
        now = [p.list_grad() for p in self._params]
        known = {id(p): b.arrays[k] for b in self._buckets for k, p in enumerate(b.params)}
        if not self._buckets or any(
            len(known[id(p)]) != len(g) or any(a is not b for a, b in zip(known[id(p)], g))
            for p, g in zip(self._params, now)
        ):
            self._buckets = [
                _Bucket(
                    number,
                    [self._params[i] for i in span.indices],
                    [list(now[i]) for i in span.indices],
                    np.empty(sum(now[i][0].size for i in span.indices) + TAIL, span.dtype),
                )
                for number, span in enumerate(_plan(self._params, self._bucket_bytes))
            ]
        return self._buckets

    def _run(self, job: _Job) -> None:
        """In the engine: pack, sum over ranks and clients, scale, unpack."""
        start, buffer, error = time.perf_counter(), job.bucket.buffer, job.error
        try:
            job.pack()
        except Exception as cause:
            error = f"packing failed: {cause!r}"
        buffer[_SAMPLES], buffer[_ERRORS] = job.weight, error is not None
        self._sum(job)
        if self._between is not None:
            error = self._sum_clients(job, error)
        if buffer[_ERRORS]:
            self._raise_everywhere(job, error)
        job.unpack()
        self._counters.collective_bytes += buffer.nbytes
        self._counters.collective_s += time.perf_counter() - start

    def _sum(self, job: _Job) -> None:
        try:
            allreduce(job.bucket.buffer, self._comm, self._algorithm)
        except CollectiveError as cause:
            raise type(cause)(f"{job.bucket}, step {job.step}: {cause}") from cause

    def _sum_clients(self, job: _Job, error: Optional[str]) -> Optional[str]:
        buffer = job.bucket.buffer
        if self._comm.rank == 0 and not buffer[_ERRORS]:
            try:
                self._between(job.bucket.number, buffer)  # type: ignore[misc]
            except Exception as cause:
                buffer[_ERRORS], error = 1, str(cause)
        self._comm.broadcast(buffer, f"{job.bucket}, step {job.step}")
        return error

    def _raise_everywhere(self, job: _Job, error: Optional[str]) -> None:
        texts = self._comm.allgather(error, f"the errors of {job.bucket}")
        said = [f"rank {r}: {text}" for r, text in enumerate(texts) if text is not None]
        cause = "; ".join(said) or "a rank of another client has the cause in its log"
        raise CollectiveError(
            f"{job.bucket}, step {job.step}, seen by rank {self._comm.rank}: {cause}"
        )

    def check_equal(self, value: float, what: str) -> None:
        """Push a check that `value` is the same on all ranks; a later `check` raises."""
        if self._comm.size == 1:
            return

        def compare() -> None:
            values = self._comm.allgather(value, f"the check of {what}")
            if len(set(values)) > 1:
                raise CollectiveError(f"{what} must be the same on all ranks, got {values} by rank")

        self._lane.push(compare, f"check {what}")


@dataclass
class _Job:
    """One bucket in one step: what the engine needs when its turn comes."""

    bucket: _Bucket
    views: List[List[np.ndarray]]
    weight: float
    scale: float
    skipped: set
    error: Optional[str]
    step: int

    def pack(self) -> None:
        """Lay the sums over this process's devices side by side into the buffer."""
        start = 0
        for param, views in zip(self.bucket.params, self.views):
            out = self.bucket.buffer[start : start + views[0].size]
            start += out.size
            if self.weight == 0 or self.error is not None or param.name in self.skipped:
                out[:] = 0
                continue
            out[:] = views[0]
            for other in views[1:]:
                np.add(out, other, out=out)

    def unpack(self) -> None:
        """Write the scaled sums to every device; zeros where no rank had a sample."""
        buffer, start = self.bucket.buffer, 0
        total = float(buffer[_SAMPLES])
        factor = self.scale / total if total else 0.0
        np.multiply(buffer, buffer.dtype.type(factor), out=buffer)
        for views in self.views:
            for out in views:
                out[:] = buffer[start : start + out.size]
            start += views[0].size


def _on_cpu(array: mx.nd.NDArray) -> mx.nd.NDArray:
    return array if array.context.device_type == "cpu" else array.copyto(mx.cpu())
