"""The gradients of a step: packed in buckets, summed in the engine, scaled to means.

The tail of each bucket carries the rank's sample count and an error mark, so a
rank with a local error still comes to its collective, and nobody waits for it.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .collectives import allreduce, pack_order
from .communicator import Communicator
from .counters import Counters
from .engine import Lane, view
from .errors import CollectiveError
from .settings import Settings

__all__ = ["TAIL", "GradientReducer", "bucket_sizes"]

TAIL = 2  # sample count, number of ranks with an error
_SAMPLES, _ERRORS = -2, -1

_NAMED = 3  # parameters that an error message names


@dataclass
class _Bucket:
    """Gradients that travel together.

    `arrays` are those of all devices of this process, by parameter; `staged` are the same,
    or CPU arrays beside those that lie on another kind of device.
    """

    number: int
    params: List[Parameter]
    arrays: List[List[mx.nd.NDArray]]
    staged: List[List[mx.nd.NDArray]]
    buffer: np.ndarray

    def stage(self) -> None:
        """Push copies of what is not on the CPU to beside it."""
        for array, copy in self._copies():
            array.copyto(copy)

    def unstage(self) -> None:
        """Push the copies back."""
        for array, copy in self._copies():
            copy.copyto(array)

    def _copies(self) -> Iterator[Tuple[mx.nd.NDArray, mx.nd.NDArray]]:
        for arrays, staged in zip(self.arrays, self.staged):
            yield from ((a, b) for a, b in zip(arrays, staged) if a is not b)

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
    settings : Settings
        Its algorithm and bucket_bytes.
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
        settings: Settings,
        between: Optional[Callable[[int, np.ndarray], None]] = None,
    ) -> None:
        self._params = list(params)
        self._comm, self._lane, self._counters = comm, lane, counters
        self._algorithm, self._bucket_bytes = settings.algorithm, settings.bucket_bytes
        self._between = between
        self._buckets: List[_Bucket] = []

    @property
    def needed(self) -> bool:
        """Whether there is anything to reduce: another rank, device or client."""
        devices = max((len(p.list_ctx()) for p in self._params), default=1)
        return self._comm.size > 1 or devices > 1 or self._between is not None

    def reduce(
        self, step: int, weight: float, stale: Sequence[int] = (), error: Optional[str] = None
    ) -> None:
        """Push the collectives of one step; collective over the client's ranks.

        Afterwards, in the engine's order, every gradient is the sum over all ranks
        and devices divided by the sum of all weights.

        Parameters
        ----------
        step : int
            The trainer's, for messages.
        weight : float
            Samples behind this rank's gradients; with 0 they count as zeros.
        stale : sequence of int
            Positions in `params` that count as zeros on this rank.
        error : str, optional
            A local error: it is raised on every rank, and no gradient changes.
        """
        skipped = {self._params[i].name for i in stale}
        for bucket in self._current():
            bucket.stage()
            views = [[view(a) for a in per_device] for per_device in bucket.staged]
            job = _Reduction(bucket, views, weight, skipped, error, step)
            held = [a for per_device in bucket.staged for a in per_device]
            self._lane.push(functools.partial(self._run, job), f"allreduce {bucket}", writes=held)
            bucket.unstage()

    def _current(self) -> List[_Bucket]:
        """The buckets, laid anew when a gradient array was replaced (cast, reset_ctx, ...)."""
        now = [p.list_grad() for p in self._params]
        known = {id(p): b.arrays[k] for b in self._buckets for k, p in enumerate(b.params)}
        if not self._buckets or any(
            len(known[id(p)]) != len(g) or any(a is not b for a, b in zip(known[id(p)], g))
            for p, g in zip(self._params, now)
        ):
            for arrays in now:
                for array in arrays:
                    array.wait_to_read()  # new ones have no memory before
            self._buckets = [
                _Bucket(
                    number,
                    [self._params[i] for i in span.indices],
                    [list(now[i]) for i in span.indices],
                    [[_beside(a) for a in now[i]] for i in span.indices],
                    np.empty(sum(now[i][0].size for i in span.indices) + TAIL, span.dtype),
                )
                for number, span in enumerate(_plan(self._params, self._bucket_bytes))
            ]
        return self._buckets

    def _run(self, job: _Reduction) -> None:
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

    def _sum(self, job: _Reduction) -> None:
        what = f"{job.bucket}, step {job.step}"
        allreduce(job.bucket.buffer, self._comm, self._algorithm, what)

    def _sum_clients(self, job: _Reduction, error: Optional[str]) -> Optional[str]:
        # With an error too: the mark tells the other clients, who would wait in vain.
        buffer = job.bucket.buffer
        if self._comm.rank == 0:
            try:
                self._between(job.bucket.number, buffer)  # type: ignore[misc]
            except Exception as cause:
                buffer[_ERRORS], error = 1, str(cause)
        self._comm.broadcast(buffer, f"{job.bucket}, step {job.step}")
        return error

    def _raise_everywhere(self, job: _Reduction, error: Optional[str]) -> None:
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
class _Reduction:
    """One bucket in one step: what the engine needs when its turn comes."""

    bucket: _Bucket
    views: List[List[np.ndarray]]
    weight: float
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
        factor = 1.0 / total if total else 0.0
        np.multiply(buffer, buffer.dtype.type(factor), out=buffer)
        for views in self.views:
            for out in views:
                out[:] = buffer[start : start + out.size]
            start += views[0].size


def _beside(array: mx.nd.NDArray) -> mx.nd.NDArray:
    if array.context.device_type == "cpu":
        return array
    return mx.nd.empty(array.shape, mx.cpu(), array.dtype)  # allocated now, so it can be viewed
