"""The gradients of a step: summed bucket by bucket in the engine, and scaled to means.

The tail of each bucket carries the rank's sample count and an error mark, so a
rank with a local error still comes to its collective, and nobody waits for it.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import numpy as np
from mxnet.gluon import Parameter

from .bucket import ERRORS, Bucket, Layout, Packing, lay
from .collectives import Plan, divide_by_weight, plan, shared_array
from .collectives.operations import WIDE
from .collectives.registry import find
from .communicator import Communicator
from .counters import Counters
from .device_bucket import DeviceBucket, DevicePacking, devices_of, lay_on_devices
from .engine import Lane
from .errors import CollectiveError
from .settings import Settings

__all__ = ["GradientReducer"]

_ERROR = float(1 << 20)  # far from what other marks add up to
_KINDS_OF_RATES = 1021  # a prime; marks are whole numbers that float32 adds up exactly


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
        Its algorithm, bucket_bytes and compression.
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
        self._compression = settings.compression
        self.between = between
        self._kinds: Tuple[List[Any], List[Any]] = ([], [])
        self._layouts: List[Layout] = []
        self._devices: List[int] = []
        self._buckets: Sequence[Union[Bucket, DeviceBucket]] = []
        self._plans: List[Plan] = []
        self._spreads: List[Plan] = []  # broadcasts of what came from other clients

    @property
    def needed(self) -> bool:
        """Whether there is anything to reduce: another rank, device or client."""
        if self._comm.size > 1 or self.between is not None:
            return True
        return bool(self._params) and len(self._params[0].list_ctx()) > 1  # the same for all

    def lengths(self) -> List[int]:
        """Return the elements of each bucket with its tail, in the order of travel; collective."""
        self._lay()
        return [layout.size for layout in self._layouts]

    def house(self) -> None:
        """Let gradients live in the buckets, before the next backward pass; collective."""
        if self.needed:
            self._lay()
            for bucket in self._buckets:
                bucket.house()

    def settle(self) -> None:
        """Find the gradients where backward has left them; collective, before `reduce`."""
        if self.needed:
            self._lay()
            for bucket in self._buckets:
                bucket.settle()

    def reduce(
        self,
        step: int,
        weight: float,
        stale: Sequence[int] = (),
        error: Optional[str] = None,
        rates: Sequence[float] = (),
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
            A local error: it is raised on every rank, and gradients are of no use any more.
        rates : sequence of float
            Learning rate and the like, which all ranks must have alike or their weights part.
        """
        absent = {self._params[i].name for i in stale}
        if weight == 0 or error is not None:
            absent = {p.name for p in self._params}
        for bucket, plan_ in zip(self._buckets, self._plans):
            bucket.stage()
            job = _Reduction(bucket, plan_, bucket.packing(absent), weight, error, step, rates)
            run = functools.partial(self._run, job)
            self._lane.push(run, f"allreduce {bucket}", writes=bucket.arrays)
            bucket.unstage()

    def _lay(self) -> None:
        """Make the buckets, anew where types (cast) or GPUs (reset_ctx) have changed; collective.

        It waits only then.
        """
        kinds = [p._dtype for p in self._params], [p._ctx_list for p in self._params]
        if kinds == self._kinds:
            return
        layouts, devices = lay(self._params, self._bucket_bytes), self._devices_now()
        if (layouts, devices) != (self._layouts, self._devices):
            self._lane.wait()  # whatever still travels in the old ones
            self._buckets = self._make_buckets(layouts, devices)
            self._plans = [self._plan("allreduce", bucket) for bucket in self._buckets]
            if self.between is not None:
                self._spreads = [self._plan("broadcast", bucket) for bucket in self._buckets]
            self._layouts, self._devices = layouts, devices  # only what has all of its plans
        self._kinds = kinds

    def _plan(self, collective: str, bucket: Union[Bucket, DeviceBucket]) -> Plan:
        what = f"gradient bucket {bucket.number}"
        if collective == "broadcast":
            return plan(collective, bucket.vectors, self._comm, what=what)
        return plan(
            collective,
            bucket.vectors,
            self._comm,
            op="weighted_mean" if self.between is None else "weighted_sum",
            algorithm=self._algorithm,
            what=what,
            compression=self._compression if bucket.vectors[0].dtype.name in WIDE else None,
        )

    @property
    def _may_use_gpus(self) -> bool:
        """Whether buckets may lie on GPUs at all; the same on all ranks."""
        # Clients sum what lies in host memory.
        asked = self._algorithm == "auto" or find("allreduce", self._algorithm).memory == "device"
        return asked and self.between is None

    def _devices_now(self) -> List[int]:
        return devices_of(self._params) if self._may_use_gpus else []

    def _make_buckets(
        self, layouts: Sequence[Layout], devices: Sequence[int]
    ) -> Sequence[Union[Bucket, DeviceBucket]]:
        if self._may_use_gpus:
            made = lay_on_devices(self._params, layouts, devices, self._comm)
            if made:
                return made
        return [
            Bucket(
                number, self._params, layout, shared_array(layout.size, layout.dtype, self._comm)
            )
            for number, layout in enumerate(layouts)
        ]

    def _run(self, job: _Reduction) -> None:
        """In the engine: pack, sum over ranks and clients, scale, unpack."""
        start, bucket, error = time.perf_counter(), job.bucket, job.error
        try:
            job.pack()
        except Exception as cause:
            error = f"packing failed: {cause!r}"
        bucket.set_tail(job.weight, self._mark(job, error))
        job.plan(str(job))
        if self.between is not None:
            error = self._sum_clients(job, error)
        if bucket.errors():
            self._raise_everywhere(job, error)
        job.packing.unpack()
        self._counters.collective_bytes += sum(vector.nbytes for vector in bucket.vectors)
        self._counters.collective_s += time.perf_counter() - start

    def _mark(self, job: _Reduction, error: Optional[str]) -> float:
        """What the ranks' marks add up to is 0 where no rank has an error and rates are alike."""
        if job.bucket.vectors[0].dtype == np.float16:  # which holds no large whole numbers
            return float(error is not None)
        if error is not None:
            return _ERROR
        kind = hash(tuple(job.rates)) % _KINDS_OF_RATES
        return kind * (self._comm.size - 1) if self._comm.rank == 0 else -kind

    def _sum_clients(self, job: _Reduction, error: Optional[str]) -> Optional[str]:
        # With an error too: the mark tells the other clients, who would wait in vain.
        assert isinstance(job.bucket, Bucket)  # see _may_use_gpus
        buffer = job.bucket.buffer
        if self._comm.rank == 0:
            try:
                self.between(job.bucket.number, buffer)  # type: ignore[misc]
            except Exception as cause:
                buffer[ERRORS], error = 1, str(cause)
        self._spreads[job.bucket.number](str(job))
        divide_by_weight(buffer)
        return error

    def _raise_everywhere(self, job: _Reduction, error: Optional[str]) -> None:
        gathered = self._comm.allgather([error, list(job.rates)], f"the errors of {job.bucket}")
        said = [f"rank {r}: {text}" for r, (text, _) in enumerate(gathered) if text is not None]
        rates = [theirs for _, theirs in gathered]
        if not said and any(theirs != rates[0] for theirs in rates):
            said = [f"learning rate and wd must be the same on all ranks, got {rates} by rank"]
        cause = "; ".join(said) or "a rank of another client has the cause in its log"
        raise CollectiveError(f"{job}, seen by rank {self._comm.rank}: {cause}")

    def check_equal(self, value: Any, what: str) -> None:
        """Push a check that `value` is the same on all ranks; a later `check` raises."""
        if self._comm.size == 1:
            return

        def compare() -> None:
            values = self._comm.allgather(value, f"the check of {what}")
            if any(other != values[0] for other in values):
                raise CollectiveError(f"{what} must be the same on all ranks, got {values} by rank")

        self._lane.push(compare, f"check {what}")


@dataclass
class _Reduction:
    """One bucket in one step: what the engine needs when its turn comes."""

    bucket: Union[Bucket, DeviceBucket]
    plan: Plan
    packing: Union[Packing, DevicePacking]
    weight: float
    error: Optional[str]
    step: int
    rates: Sequence[float]

    def pack(self) -> None:
        """Fill the bucket but for its tail."""
        self.packing.pack()

    def __str__(self) -> str:
        return f"{self.bucket}, step {self.step}"
