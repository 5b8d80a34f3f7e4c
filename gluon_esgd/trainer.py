"""`ElasticTrainer`: ``gluon.Trainer`` for one process, many ranks and many clients."""

from __future__ import annotations

import logging
import math
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Union

from mxnet import gluon
from mxnet.kvstore import KVStore

from .counters import Counters
from .exchange import CenterExchange, Interval
from .gradients import GradientReducer, bucket_sizes
from .job import job
from .parameters import Weights, broadcast, check_alike, contract, digest, follow_leader
from .policy import resolve
from .rounds import ClientRounds

__all__ = ["ElasticTrainer"]

_log = logging.getLogger(__name__)

_LARGEST_BATCH = 1 << 24  # sample counts travel as float32


class ElasticTrainer(gluon.Trainer):
    """Apply an optimizer to parameters, alone or together with other processes.

    In one process it is ``gluon.Trainer``, to the bit. Ranks of a client take the
    mean gradient of all their samples in every step; clients meet through the
    servers by `rule`. Making one is collective in the client: all ranks bring
    the same parameters, and take the leader's values.

    Parameters
    ----------
    params, optimizer, optimizer_params
        As for ``gluon.Trainer``. The optimizer always runs in this process.
    kvstore : str or KVStore, default 'device'
        In a distributed job only looked at for a rule: a string with ``dist``
        in it means ``asgd`` if it has ``async``, else ``sgd``.
    compression_params : dict, optional
        Refused in a distributed job.
    update_on_kvstore : bool, optional
        In a distributed job None and False; True is taken with a warning.
    rule : {'sgd', 'asgd', 'esgd'}, optional
        What clients do; unset: launcher, kvstore string, then ``sgd`` with one
        client, else ``esgd``.
    interval : int or callable, optional
        Optimizer steps between two exchanges, or a function of the step.
    alpha, beta : float, optional
        Moving rate, ``alpha = beta / max(2, num_clients)``; one of the two.
    lazy : int, optional
        Steps from an exchange's snapshot to its application, 1 unless given.

    Raises
    ------
    ValueError
        On all ranks: parameters that differ over ranks. Where it is wrong: an
        argument, by name.
    TopologyError
        On all ranks: the processes are not those that were announced.

    See Also
    --------
    docs/algorithms.md : equations, defaults and the six algorithms.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Optional[Dict[str, Any]] = None,
        kvstore: Any = "device",
        compression_params: Optional[Dict[str, Any]] = None,
        update_on_kvstore: Optional[bool] = None,
        *,
        rule: Optional[str] = None,
        interval: Union[int, Callable[[int], int], None] = None,
        alpha: Optional[float] = None,
        beta: Optional[float] = None,
        lazy: Optional[int] = None,
    ) -> None:
        self._job = job()
        world, settings = self._job.world, self._job.world.settings
        shared = world.is_distributed or settings.num_servers > 0
        if shared:
            _check_arguments(world, kvstore, compression_params, update_on_kvstore)
            super().__init__(params, optimizer, optimizer_params, kvstore=None)
        else:
            local = "device" if isinstance(kvstore, str) and "dist" in kvstore else kvstore
            super().__init__(
                params, optimizer, optimizer_params, local, compression_params, update_on_kvstore
            )
        self._policy = resolve(
            settings,
            self._optimizer,
            kvstore,
            rule=rule,
            interval=interval,
            alpha=alpha,
            beta=beta,
            lazy=lazy,
        )
        self.counters = Counters()
        self._alone = not world.is_distributed and not self._policy.has_center
        self._started = self._alone
        self._in_center = False
        self._first_weight_zero = False
        if not self._alone:
            self._join()

    def _join(self) -> None:
        """Enter the job: compare with the other ranks, take the leader's values."""
        world, policy = self._job.world, self._policy
        for param in self._params:
            if (param._stype, param._grad_stype) != ("default", "default"):
                raise ValueError(
                    f"parameter {param.name!r} is row-sparse, which a distributed run does not "
                    "exchange; make it dense (sparse_grad=False, stype='default')"
                )
        if world.size > 1 and type(self._optimizer).__name__ == "SGLD":
            raise ValueError(
                "optimizer 'sgld' draws its own noise on every rank, so the ranks of a client "
                "would part; use one rank per client or another optimizer"
            )
        name = self._job.claim(policy.rule)
        check_alike(self._params, world.control)
        if world.size > 1:
            follow_leader(self._params, world.control)
        self._reducer: Optional[GradientReducer] = None
        self._reduced: List[gluon.Parameter] = []
        self._exchange: Optional[CenterExchange] = None
        link = self._job.link() if world.num_clients > 1 or policy.has_center else None
        self._rounds = ClientRounds(world, link, name)
        if policy.has_center:
            self._exchange = CenterExchange(
                world,
                self._job.lane,
                link,
                name,
                rule=policy.rule,
                alpha=policy.alpha,
                interval=Interval(policy.interval),
                lazy=policy.lazy,
                counters=self.counters,
            )
        self._finished = True  # until there is something to finish

    # ---- what it does ----

    @property
    def rule(self) -> str:
        """The rule between clients: 'sgd', 'asgd' or 'esgd'."""
        return self._policy.rule

    @property
    def interval(self) -> Union[int, Callable[[int], int]]:
        """Optimizer steps between two exchanges, or a function of the step."""
        return self._policy.interval

    @property
    def alpha(self) -> float:
        """The moving rate of an exchange."""
        return self._policy.alpha

    # ---- a step ----

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Take the mean gradient over all samples of the client and update; does not wait.

        Collective in the client.

        Parameters
        ----------
        batch_size : int
            This rank's own samples; they may differ over ranks. 1 where the
            loss is a mean already. Gradients end up as means over all samples.
        ignore_stale_grad : bool, default False
            Skip parameters whose gradient is old on every rank; a rank whose
            gradient is old counts as zero.

        Raises
        ------
        CollectiveError, CenterError
            On all ranks of the client: what an earlier step met in the engine.
        """
        start = time.perf_counter()
        if self._alone:
            super().step(batch_size, ignore_stale_grad)
        else:
            self._prepare()
            _check_batch(batch_size)
            reduced = self._reduce(batch_size, ignore_stale_grad)
            # Reduced gradients are means over samples already.
            self._optimizer.rescale_grad = self._scale / (1 if reduced else batch_size)
            self._update(ignore_stale_grad)
        self._after_update(start)

    def allreduce_grads(self) -> None:
        """Make gradients their mean over the ranks of the client; collective, does not wait.

        To change gradients (clip them, say) before `update`.
        """
        if self._alone:
            super().allreduce_grads()
        else:
            self._prepare()
            reducer = self._current_reducer()
            if reducer.needed:
                reducer.reduce(0 if self._first_weight_zero else 1, 1.0)

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update from gradients that `allreduce_grads` has reduced.

        Parameters
        ----------
        batch_size : int
            Samples of one rank, the same on all: gradients are divided by it.
        ignore_stale_grad : bool, default False

        Raises
        ------
        CollectiveError
            On all ranks, at a later step, when `batch_size` differed.
        """
        start = time.perf_counter()
        if self._alone:
            super().update(batch_size, ignore_stale_grad)
        else:
            self._prepare()
            _check_batch(batch_size)
            self._current_reducer().check_equal(float(batch_size), "batch_size of update()")
            if ignore_stale_grad:
                self._share_freshness(self._stale())
            self._optimizer.rescale_grad = self._scale / batch_size
            self._update(ignore_stale_grad)
        self._after_update(start)

    def _after_update(self, start: float) -> None:
        self.counters.steps += 1
        if not self._alone:
            self._first_weight_zero = False
            if self._exchange is not None:
                self._exchange.after_update(self.counters.steps)
            else:
                self.counters.server_bytes = self._rounds.server_bytes
        self.counters.step_wait_s += time.perf_counter() - start

    def _prepare(self) -> None:
        self._job.lane.check()
        if self._in_center:
            raise RuntimeError(
                "the network holds the center's weights: leave `with trainer.center():` before "
                "training on"
            )
        if not self._started:
            self._start()
        if self._finished:
            self._finished = False
            self._job.finish_at_exit(self)

    def _start(self) -> None:
        """At the first step: all ranks alike, then all clients alike."""
        world = self._job.world
        for param in self._params:
            param.list_data()  # Gluon's own error where one is not initialized
        check_alike(self._params, world.control)
        replaced = self._equal_ranks()
        self._weights = Weights(self._params, self._optimizer, self._updaters)
        agreed = contract(self._params, self._policy.rule)
        if self._exchange is not None:
            replaced |= self._exchange.start(self._weights, agreed)
        elif world.num_clients > 1:
            buckets = bucket_sizes(self._trainable(), world.settings.bucket_bytes)
            replaced |= self._rounds.start(self._weights, buckets, agreed)
        # A gradient that belongs to other weights counts nothing.
        self._first_weight_zero = replaced
        self._started = True

    def _equal_ranks(self) -> bool:
        """Give ranks whose weights differ the leader's; whether this rank's were replaced."""
        world = self._job.world
        if world.size == 1:
            return False
        digests = world.allgather(digest(self._params))
        if len(set(digests)) == 1:
            return False
        others = [r for r, d in enumerate(digests) if d != digests[0]]
        if world.is_leader:
            _log.warning("ranks %s had other weights than rank 0 and took its", others)
        broadcast(self._params, world.control)
        return world.rank in others

    def _trainable(self) -> List[gluon.Parameter]:
        return [p for p in self._params if p.grad_req != "null"]

    def _current_reducer(self) -> GradientReducer:
        """The reducer for what has gradients now; collective when that has changed."""
        trainable = self._trainable()
        if self._reducer is None or trainable != self._reduced:
            world = self._job.world
            check_alike(trainable, world.control)
            between = self._exchange is None and world.num_clients > 1
            self._reduced = trainable
            self._reducer = GradientReducer(
                trainable,
                world.comm,
                self._job.lane,
                self.counters,
                algorithm=world.settings.algorithm,
                bucket_bytes=world.settings.bucket_bytes,
                between=self._rounds.sum_bucket if between else None,
            )
        return self._reducer

    def _reduce(self, samples: float, ignore_stale_grad: bool) -> bool:
        """Push the collectives of a step; whether there were any."""
        reducer = self._current_reducer()
        if not reducer.needed:
            if self._first_weight_zero:
                for param in self._reduced:
                    for grad in param.list_grad():
                        grad[:] = 0
            return False
        stale = self._stale()
        error = None
        if ignore_stale_grad:
            self._share_freshness(stale)
        elif stale:
            # The others must not wait for the rank that is about to raise.
            error = f"gradient of {self._reduced[stale[0]].name} was not updated by backward"
        reducer.reduce(0 if self._first_weight_zero else samples, 1.0, stale, error)
        return True

    def _stale(self) -> List[int]:
        return [
            i
            for i, param in enumerate(self._reduced)
            if not all(data._fresh_grad for data in param.list_data())
        ]

    def _share_freshness(self, stale: List[int]) -> None:
        """What is fresh on any rank is updated on all; waits."""
        world = self._job.world
        everywhere = set(stale).intersection(*world.allgather(stale))
        for i in set(stale) - everywhere:
            for data in self._reduced[i].list_data():
                data._fresh_grad = True

    # ---- the center ----

    @contextmanager
    def center(self, sync: bool = False) -> Iterator[None]:
        """Let the network hold the center's weights, on every rank, for the ``with`` block.

        Collective in the client: it completes the exchange in flight. Under
        rule ``sgd`` these are the client's own weights with running statistics
        meaned over the job (collective in the job with several clients).

        Parameters
        ----------
        sync : bool, default False
            All clients see the same version; collective in the job.

        Raises
        ------
        CenterError
            On all ranks of the client: the servers did not answer and no
            center was seen before.
        RuntimeError
            From `step` inside the block.
        """
        if self._alone:
            yield
            return
        self._prepare()
        if self._exchange is not None:
            flat = self._exchange.pull(sync)
        else:
            self._job.lane.wait()
            flat = self._rounds.mean_statistics(self._weights)
        own = self._weights.own()
        self._weights.write(flat)
        self._in_center = True
        try:
            yield
        finally:
            self._in_center = False
            self._weights.restore(own)

    def finish(self) -> None:
        """Complete what is in flight and make a last exchange; collective in the client, waits.

        A clean end of the script calls it where it was not called.
        """
        if self._alone or self._finished:
            return
        self._prepare()
        if self._exchange is not None:
            self._exchange.exchange_now()
        self._job.lane.wait()
        self.counters.server_bytes = self._rounds.server_bytes
        self._finished = True
        self._job.finished(self)

    def reset_center(self) -> None:
        """Set the center to client 0's weights now; collective in the job, waits.

        After weights were loaded in mid-run, which the old center would pull back.
        """
        if self._alone:
            return
        self._prepare()
        if self._exchange is not None:
            self._exchange.reset()


def _check_arguments(
    world: Any, kvstore: Any, compression_params: Any, update_on_kvstore: Optional[bool]
) -> None:
    if isinstance(kvstore, KVStore) and "dist" in kvstore.type:
        raise ValueError(
            f"kvstore={kvstore.type!r} as an object cannot be used in a distributed job "
            f"({world}): pass its name as a string, or leave kvstore unset"
        )
    if compression_params is not None:
        raise ValueError(
            f"compression_params={compression_params!r} is not offered in a distributed job; "
            "leave it unset"
        )
    if update_on_kvstore:
        _log.warning("update_on_kvstore=True: the optimizer runs on the workers all the same")


def _check_batch(batch_size: float) -> None:
    if not isinstance(batch_size, (int, float)) and not hasattr(batch_size, "__float__"):
        raise TypeError(f"batch_size={batch_size!r} must be a number of samples")
    if not 0 < batch_size < _LARGEST_BATCH or math.isnan(batch_size):
        raise ValueError(
            f"batch_size={batch_size!r} must be above 0 and below {_LARGEST_BATCH} samples"
        )
