"""The gradients of a step: summed bucket by bucket in the engine, and scaled to means.

The tail of each bucket carries the rank's sample count and an error mark, so a
rank with a local error still comes to its collective, and nobody waits for it.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from typing import Any, List, Optional, Protocol, Sequence, Tuple, Type, Union

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
from .errors import CollectiveError, LostClientsError
from .settings import Settings

__all__ = ["JOIN", "PAIR", "STEP", "GradientReducer"]

# What a rank that brings gradients is doing.
STEP, PAIR, JOIN = "step()", "allreduce_grads()", "join()"

_ERROR = float(1 << 20)  # far from what other marks add up to
_FAILED = 4096.0  # between clients, above their number; half floats hold a few of them
_CANNOT_FOLLOW = (
    "{} have called join(), and cannot follow what others do between allreduce_grads() and "
    "update(): use step(), or give all ranks equally many batches"
)
_KINDS_OF_RATES = 1021  # a prime; marks are whole numbers that float32 adds up exactly


class Between(Protocol):
    """Other clients, with whom gradients are summed (rule ``sgd``); see `ClientRounds`."""

    num_clients: int

    def start_sum(self, number: int, buffer: np.ndarray, what: str) -> None:
        """Start to sum bucket `number` over the clients; in the engine, on the leader."""

    def finish_sum(self, number: int, buffer: np.ndarray, what: str) -> None:
        """Put the sum into `buffer`, once it is there; in the engine, on the leader."""

    def gather(self, rates: Sequence[float]) -> List[List[float]]:
        """Return the two `rates` of each client; in the engine, on the leader."""


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
    between : Between, optional
        With several clients under rule ``sgd``.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        comm: Communicator,
        lane: Lane,
        counters: Counters,
        settings: Settings,
        between: Optional[Between] = None,
    ) -> None:
        self._params = list(params)
        self._comm, self._lane, self._counters = comm, lane, counters
        self._algorithm, self._bucket_bytes = settings.algorithm, settings.bucket_bytes
        if between is not None:  # allreduce, round and broadcast of different buckets overlap
            self._bucket_bytes //= 2
        self._compression = settings.compression
        self.between = between
        self._kinds: Tuple[List[Any], List[Any]] = ([], [])
        self._layouts: List[Layout] = []
        self._devices: List[int] = []
        self._buckets: Sequence[Union[Bucket, DeviceBucket]] = []
        self._plans: List[Plan] = []
        self._spreads: List[Plan] = []  # broadcasts of what came from other clients
        self._not_started: Optional[str] = None  # why a round was not
        #: Set in the engine, on a rank that has joined: whether all have, and the rates of others.
        self.all_joined = False
        self.rates_of_others: Sequence[float] = ()

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
        doing: str = STEP,
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
            Learning rate and the like, which all ranks must have alike or their weights part; a
            rank that has joined takes them from the others.
        doing : {STEP, PAIR, JOIN}
        """
        absent = {self._params[i].name for i in stale}
        if weight == 0 or error is not None:
            absent = {p.name for p in self._params}
        jobs = []
        for bucket, plan_ in zip(self._buckets, self._plans):
            bucket.stage()
            packing = bucket.packing(absent)
            jobs.append(_Reduction(bucket, plan_, packing, weight, error, step, rates, doing))
            run = functools.partial(self._run, jobs[-1])
            self._lane.push(run, f"allreduce {bucket}", writes=bucket.arrays)
        for job in jobs:
            if self.between is not None:  # while the rounds of later buckets are under way
                run = functools.partial(self._finish_round, job, self.between)
                self._lane.push(run, f"sum over clients of {job.bucket}", writes=job.bucket.arrays)
            job.bucket.unstage()

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
        """In the engine: pack, sum over ranks; then scale and unpack, or begin with clients."""
        start, bucket, error = time.perf_counter(), job.bucket, job.error
        try:
            job.pack()
        except Exception as failure:
            error = f"packing failed: {failure!r}"
        bucket.set_tail(job.weight, self._mark(job, error))
        job.plan(str(job))
        if bucket.errors():
            job.cause, job.all_joined = self._hear(job, error)
        if self.between is None:
            self._end(job, CollectiveError)
        elif self._comm.rank == 0:
            self._start_round(job, self.between)
        self._counters.collective_s += time.perf_counter() - start

    def _end(self, job: _Reduction, kind: Type[CollectiveError]) -> None:
        if job.cause is not None:
            raise kind(f"{job}, seen by rank {self._comm.rank}: {job.cause}")
        if job.bucket.number == 0:
            self.all_joined = job.all_joined
        job.packing.unpack()
        self._counters.collective_bytes += sum(vector.nbytes for vector in job.bucket.vectors)

    def _mark(self, job: _Reduction, error: Optional[str]) -> float:
        """What the ranks' marks add up to is 0 where all train without error, with rates alike."""
        # The first bucket is enough to tell that this rank has joined.
        speaks = error is not None or (job.doing == JOIN and job.bucket.number == 0)
        if job.bucket.vectors[0].dtype == np.float16:  # which holds no large whole numbers
            return float(speaks)
        if speaks:
            return _ERROR
        kind = hash(tuple(job.rates)) % _KINDS_OF_RATES
        return kind * (self._comm.size - 1) if self._comm.rank == 0 else -kind

    def _hear(self, job: _Reduction, error: Optional[str]) -> Tuple[Optional[str], bool]:
        """What is wrong on some rank of the client, and whether all of them have joined."""
        mine = [error, list(job.rates), job.doing]
        gathered = self._comm.allgather(mine, f"the errors of {job.bucket}")
        said = [f"rank {r}: {text}" for r, (text, _, _) in enumerate(gathered) if text is not None]
        if said:
            return "; ".join(said), False
        training = {r: rates for r, (_, rates, doing) in enumerate(gathered) if doing != JOIN}
        if not training:
            return None, True
        first, *others = training.values()
        if any(rates != first for rates in others):
            got = list(training.values())
            return f"learning rate and wd must be the same on all ranks, got {got} by rank", False
        self.rates_of_others = first
        joined = [r for r in range(self._comm.size) if r not in training]
        if joined and any(doing == PAIR for _, _, doing in gathered):
            return _CANNOT_FOLLOW.format(f"rank(s) {joined}"), False
        return None, False

    def _start_round(self, job: _Reduction, between: Between) -> None:
        """On the leader: begin the sum over clients.

        With an error too, which is raised at the round's end: the mark tells the other clients,
        who would wait in vain.
        """
        assert isinstance(job.bucket, Bucket)  # see _may_use_gpus
        buffer = job.bucket.buffer
        buffer[ERRORS] = _FAILED if job.cause is not None else float(not job.all_joined)
        if self._not_started is None:  # else each bucket would wait again for what is lost
            try:
                between.start_sum(job.bucket.number, buffer, job.sum_over_clients)
            except Exception as error:
                self._not_started = str(error)
        job.failure = self._not_started

    def _finish_round(self, job: _Reduction, between: Between) -> None:
        """In the engine: take the sum over clients, say the same of all of them, unpack."""
        start = time.perf_counter()
        kind = CollectiveError if job.cause is not None else LostClientsError
        self._take_sum(job, between)
        self._end(job, kind)
        self._counters.collective_s += time.perf_counter() - start

    def _take_sum(self, job: _Reduction, between: Between) -> None:
        assert isinstance(job.bucket, Bucket)
        buffer, number, joined = job.bucket.buffer, job.bucket.number, job.all_joined
        if self._comm.rank == 0:
            try:
                if job.failure is None:
                    between.finish_sum(number, buffer, job.sum_over_clients)
            except Exception as error:
                job.failure = str(error)
            if job.failure is not None:
                buffer[ERRORS] = _FAILED
        self._spreads[number](job.sum_over_clients)
        divide_by_weight(buffer)
        if job.cause is None and not buffer[ERRORS] < _FAILED:
            failure = self._comm.allgather(job.failure, f"the errors of {job.bucket}")[0]
            cause = "a rank of another client has the cause in its log"
            job.cause = cause if failure is None else f"rank 0: {failure}"
        training = float(buffer[ERRORS])  # how many clients
        job.all_joined = training == 0
        if job.cause is None and number == 0 and 0 < training < between.num_clients:
            job.cause = self._hear_clients(job, between, joined)

    def _hear_clients(self, job: _Reduction, between: Between, joined: bool) -> Optional[str]:
        """Where all ranks of a client have joined: let it know the rates of the others."""
        said: List[Any] = [None, None]
        if self._comm.rank == 0:
            try:
                said[0] = between.gather(self._word(job, joined))
            except Exception as error:
                said[1] = f"rank 0: {error}"
        by_client, failure = self._comm.allgather(said, f"the rates of clients in {job}")[0]
        if failure is not None:
            return str(failure)
        if any(math.isinf(rates[0]) for rates in by_client):
            return _CANNOT_FOLLOW.format("all ranks of a client")
        training = (rates for rates in by_client if not math.isnan(rates[0]))
        self.rates_of_others = next(training, ())
        return None

    def _word(self, job: _Reduction, joined: bool) -> Sequence[float]:
        """What the leader tells other clients: the rates of its own, if they can be followed."""
        if joined or job.doing == PAIR:
            return [math.nan if joined else math.inf] * 2
        return self.rates_of_others if job.doing == JOIN else job.rates

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
    doing: str
    cause: Optional[str] = None  # why it has failed, the same on all ranks
    all_joined: bool = False
    failure: Optional[str] = None  # of the round, on the leader

    def pack(self) -> None:
        """Fill the bucket but for its tail."""
        self.packing.pack()

    @property
    def sum_over_clients(self) -> str:
        """What the round is called in messages."""
        return f"the sum over clients of {self}"

    def __str__(self) -> str:
        return f"{self.bucket}, step {self.step}"
