"""`ElasticTrainer`: ``gluon.Trainer`` for one process, many ranks and many clients."""

from __future__ import annotations

import logging
import os
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Union

from mxnet import gluon

from .accumulation import Accumulation
from .arguments import check_stores, checked_batch, positions
from .clipping import Clipping, checked_norm
from .counters import Counters
from .job import job
from .policy import HALF_FLOATS, IntervalLike, resolve
from .replica import Replica
from .resume import collect_alone, load_alone, put_alone
from .running_statistics import average_over_ranks
from .states import States

__all__ = ["ElasticTrainer"]

_log = logging.getLogger(__name__)


class ElasticTrainer(gluon.Trainer):
    """Apply an optimizer to parameters, alone or together with other processes.

    In one process it is ``gluon.Trainer``, to the bit. Ranks of a client take the
    mean gradient of all their samples in every step; clients meet through the
    servers by `rule`: docs/algorithms.md has equations, defaults and the six
    algorithms. Making one is collective in the client: all ranks bring the same
    parameters, and take the leader's values.

    Parameters
    ----------
    params, optimizer, optimizer_params
        As for ``gluon.Trainer``. The optimizer always runs in this process.
    kvstore : str or KVStore, default 'device'
        In a distributed job only looked at for a rule: a string with ``dist``
        in it means ``asgd`` if it has ``async``, else ``sgd``.
    compression_params : dict, optional
        In a distributed job ``{"type": "fp16"}``: half floats between machines and
        to the servers. Nothing else is offered there.
    update_on_kvstore : bool, optional
        In a distributed job None and False; True is taken with a warning.
    rule : str, optional
        What clients do: ``sgd``, ``asgd`` or ``esgd``. Unset: as the launcher
        or the kvstore string says, then ``sgd`` with one client, else ``esgd``.
    interval : int or callable, optional
        Optimizer steps between two exchanges, or a function of the step.
    alpha, beta : float, optional
        Moving rate, ``alpha = beta / max(2, num_clients)``; one of the two.
    lazy : int, optional
        Steps from an exchange's snapshot to its application, 1 unless given.
    outer : dict, optional
        Momentum of the center, on what clients bring: ``{"momentum": 0.9,
        "learning_rate": 1.0}``; either key. Needs a center.

    Attributes
    ----------
    counters : Counters
        What the library itself has done, docs/metrics.md.

    Raises
    ------
    ValueError
        On all ranks: parameters that differ over ranks. Where it is wrong: an
        argument, by name.
    TopologyError
        On all ranks: the processes are not those that were announced.
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
        interval: IntervalLike = None,
        alpha: Optional[float] = None,
        beta: Optional[float] = None,
        lazy: Optional[int] = None,
        outer: Optional[Mapping[str, float]] = None,
    ) -> None:
        self._job = job()
        world, settings = self._job.world, self._job.world.settings
        shared = world.is_distributed or settings.num_servers > 0
        if shared:
            check_stores(world, kvstore, update_on_kvstore)
            super().__init__(params, optimizer, optimizer_params, kvstore=None)
        else:
            if isinstance(kvstore, str) and "dist" in kvstore:
                kvstore_here, update_on_kvstore = "device", None
            else:
                kvstore_here = kvstore
            super().__init__(
                params,
                optimizer,
                optimizer_params,
                kvstore_here,
                None if compression_params == HALF_FLOATS else compression_params,
                update_on_kvstore,
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
            outer=outer,
            compression_params=compression_params if shared else None,
            aloud=world.is_main,
        )
        self.counters = Counters()
        self._accumulation = Accumulation(self._params)
        self._clipping = Clipping(self._params, self._job.lane, aloud=world.is_leader)
        self._in_center = False
        self._finished = True  # until there is something to finish
        self._after_step: Optional[Callable[[], None]] = None  # of a loop that saves checkpoints
        self._replica: Optional[Replica] = None
        if shared:
            order = positions(params, self._params)
            self._replica = Replica(self._job, self, order, self._policy, self.counters)

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
        if self._accumulation.open:
            self._count(batch_size)
            return
        start = time.perf_counter()
        replica, batch_size = self._prepare(), self._with_counted(batch_size)
        if replica is None:
            super().step(batch_size, ignore_stale_grad)
        else:
            batch_size = checked_batch(batch_size)
            reduced = replica.reduce(batch_size, ignore_stale_grad)
            # Reduced gradients are means over samples already.
            self._optimizer.rescale_grad = self._scale / (1 if reduced else batch_size)
            replica.before_update()
            self._update(ignore_stale_grad)
        self._after_update(start)

    def allreduce_grads(self) -> None:
        """Make gradients their mean over the ranks of the client; collective, does not wait.

        To change gradients (clip them, say) before `update`.

        Raises
        ------
        CollectiveError, CenterError
            On all ranks of the client: what an earlier step met in the engine.
        RuntimeError
            Inside `no_sync`.
        """
        self._accumulation.refuse("allreduce_grads()")
        replica = self._prepare()
        if replica is None:
            super().allreduce_grads()
        else:
            replica.mean_over_ranks()

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update from gradients that `allreduce_grads` has reduced.

        Parameters
        ----------
        batch_size : int
            Samples of one rank, the same on all: gradients are divided by it, with what
            `no_sync` has counted.
        ignore_stale_grad : bool, default False

        Raises
        ------
        CollectiveError
            On all ranks, at a later step, when `batch_size` differed, or the `max_norm` before.
        RuntimeError
            Inside `no_sync`.
        """
        self._accumulation.refuse("update()")
        start = time.perf_counter()
        replica, batch_size = self._prepare(), self._with_counted(batch_size)
        if replica is None:
            super().update(batch_size, ignore_stale_grad)
        else:
            batch_size = checked_batch(batch_size)
            replica.check_update(batch_size, self._clipping.norms, ignore_stale_grad)
            self._optimizer.rescale_grad = self._scale / batch_size
            replica.before_update()
            self._update(ignore_stale_grad)
        self._after_update(start)

    def clip_global_norm(self, max_norm: float) -> float:
        """Scale the gradients of all parameters so that their global L2 norm is at most `max_norm`.

        Between `allreduce_grads` and `update`: gradients are then the mean over the ranks of sums
        over a rank's samples and devices, not divided by the batch size yet, and on that scale is
        the norm. It is the same on every rank and device, so nothing is communicated; it waits for
        the gradients. With AMP call ``amp.unscale(trainer)`` before.

        Parameters
        ----------
        max_norm : float
            Above 0, the same on all ranks. With ``batch_size * c`` the update's mean gradient has
            at most norm ``c`` (after `no_sync` times all samples that were counted too).

        Returns
        -------
        float
            The norm before. When it is not finite gradients stay as they are (AMP skips such an
            update), and the leader says so once.

        Raises
        ------
        ValueError
            On this rank: a `max_norm` that is no number above 0.
        CollectiveError, CenterError
            On all ranks of the client: what the collective met in the engine.
        RuntimeError
            Inside `no_sync`.
        """
        limit = checked_norm(max_norm)
        self._accumulation.refuse("clip_global_norm()")
        self._prepare()
        return self._clipping.clip(limit)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let `step` only count this rank's samples: gradients add up, ranks do not meet.

        The next step outside takes the mean over all samples since the last update, and zeroing
        gradients after it is the script's, as ever in Gluon. Not collective, and ranks may count
        other numbers. The count outlives the block, also after an exception.

        Raises
        ------
        ValueError
            On this rank: a parameter with ``grad_req='write'``, which would forget.
        RuntimeError
            From `allreduce_grads`, `update` and `clip_global_norm` inside.

        Examples
        --------
        >>> net.collect_params().setattr("grad_req", "add")  # doctest: +SKIP
        >>> for i, (data, label) in enumerate(batches, 1):
        ...     with trainer.no_sync() if i % 4 else nullcontext():
        ...         backward(data, label)
        ...         trainer.step(len(data))
        ...     if i % 4 == 0:
        ...         net.collect_params().zero_grad()
        """
        with self._accumulation.block():
            yield

    def join(self) -> int:
        """Take part in the steps of others, with no samples, until all have come here; waits.

        For a rank that runs out of batches before the others. Collective in the client, under rule
        ``sgd`` in the job. Means are then over the samples of those that still train; this rank
        makes the same updates, with their learning rate, and its exchanges with the center, so
        replicas stay equal. What else is collective (`center`, `finish`, metrics over ranks, a
        `barrier`) is for after the join. Where nobody else takes part in a step it returns at once.

        Returns
        -------
        int
            Steps that were made here without samples of this rank.

        Raises
        ------
        CollectiveError, CenterError
            On all ranks of the client, as from `step`; also where others use `allreduce_grads` and
            `update`, between which a rank that has joined cannot do what their script does.
        RuntimeError
            On this rank: inside `no_sync`, with samples that it has counted and no step has taken;
            inside `center`; after steps with ``ignore_stale_grad=True``.

        Examples
        --------
        >>> for data, label in batches:  # as many as this rank has  # doctest: +SKIP
        ...     backward(data, label)
        ...     trainer.step(len(data))
        >>> trainer.join()  # doctest: +SKIP
        """
        self._accumulation.refuse("join()")
        if self._accumulation.samples:
            raise RuntimeError(
                f"join() with {self._accumulation.samples:g} samples that no_sync has counted: "
                "call step() outside of it first, which takes them"
            )
        replica, made = self._prepare(), 0
        while replica is not None and replica.can_join and replica.follow():
            start = time.perf_counter()
            if self._scaler is not None:  # as amp.scale_loss does where there is a loss
                self._scale = self._amp_original_scale / self._scaler.loss_scale
            self._optimizer.rescale_grad = self._scale
            replica.before_update()
            self._update()
            self._after_update(start)
            made += 1
        return made

    def _count(self, batch_size: float) -> None:
        self._check_outside_center("training on")
        self._accumulation.samples += checked_batch(batch_size)

    def _with_counted(self, batch_size: float) -> float:
        """`batch_size` and what was counted before it."""
        counted = self._accumulation.samples
        return checked_batch(batch_size) + counted if counted else batch_size

    def _prepare(self) -> Optional[Replica]:
        """What must hold before anything is done; None where this process is alone."""
        replica = self._replica
        if replica is None:
            return None
        self._check_outside_center("training on")
        replica.prepare()
        return replica

    def _check_outside_center(self, what: str) -> None:
        if self._in_center:
            raise RuntimeError(
                "the network holds the center's weights: leave `with trainer.center():` before "
                f"{what}"
            )

    def _after_update(self, start: float) -> None:
        self.counters.steps += 1
        self._forget_gradients()
        if self._replica is not None:
            self._replica.after_update()
            if self._finished:
                self._finished = False
                self._job.finish_at_exit(self, keep=self._policy.has_center)
        self.counters.step_wait_s += time.perf_counter() - start
        if self._after_step is not None:
            self._after_step()

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
        replica = self._prepare()
        if replica is None:
            yield
            return
        own = replica.show_center(sync)
        self._in_center = True
        try:
            yield
        finally:
            self._in_center = False
            replica.show_own(own)

    def average_running_stats(self) -> None:
        """Make running statistics (of BatchNorm) their mean over the client's ranks and devices.

        Collective in the client, waits. `center` does it with what it shows; this one changes the
        network itself, for what is evaluated or saved without a center.

        Raises
        ------
        ValueError
            On all ranks of the client, when they bring other statistics.
        CollectiveError, CenterError
            On all ranks of the client: what an earlier step met in the engine.
        RuntimeError
            Inside `center`.
        """
        self._prepare()
        average_over_ranks(self._params, self._job.world.control)

    def finish(self) -> None:
        """Complete what is in flight and make a last exchange; collective in the client, waits.

        A clean end of the script calls it where it was not called.

        Raises
        ------
        CollectiveError, CenterError
            On all ranks of the client.
        """
        if self._finished:
            return
        replica = self._prepare()
        if replica is not None:
            replica.finish()
        self._finished = True
        self._job.finished(self)

    def save_states(self, fname: str) -> None:
        """Save what the optimizer remembers, and in a distributed run where it stands.

        Collective in the client, whose exchange in flight it completes. Client 0 writes `fname`,
        client K ``fname.clientK``: arrays and JSON. In one process it is the file that
        ``gluon.Trainer`` writes. Weights are not in it: save the parameters beside it.

        Parameters
        ----------
        fname : str
            A path that the leader of each client can write.

        Raises
        ------
        OSError, ValueError
            On all ranks of the client: the file cannot be written; the optimizer keeps what it
            does not hold.
        CollectiveError, CenterError
            On all ranks of the client.
        """
        if self._replica is None:
            super().save_states(fname)
        else:
            self._replica.save_states(os.fspath(fname), self._scaler)

    def load_states(self, fname: str) -> None:
        """Go on from a file of `save_states`, or of ``gluon.Trainer``'s; nothing in it is run.

        Collective in the client, and then the next `step` in the job, as the first one. Only
        the leader needs to read the file. Load the parameters too, before or after. Client 0's
        center is put back on the servers. A client with a file of its own keeps its weights;
        one that has none takes client 0's file and the center. What `no_sync` has counted is
        forgotten.

        Parameters
        ----------
        fname : str
            As for `save_states`; from any number of ranks, clients and devices.

        Raises
        ------
        OSError, ValueError
            On all ranks of the client: there is no file; it is damaged, of another optimizer or
            of other parameters. The trainer is then as it was.
        RuntimeError
            Inside ``with trainer.center():``.
        CollectiveError, CenterError
            On all ranks of the client.
        """
        if self._replica is None:
            load_alone(self, fname)
        else:
            self._check_outside_center("loading states")
            self._replica.load_states(os.fspath(fname), self._scaler)
        self._forget_gradients()

    def _collect_states(self) -> Optional[States]:
        """For checkpoints: what `save_states` would write, on the leader; collective, waits."""
        if self._replica is None:
            return collect_alone(self)
        return self._replica.collect_states(self._scaler)

    def _put_states(self, states: States, own: bool) -> None:
        """For checkpoints: as `load_states`, from `states` that have been checked."""
        if self._replica is None:
            put_alone(self, states)
        else:
            self._check_outside_center("loading states")
            self._replica.put_states(states, own, self._scaler)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self._accumulation.samples, self._clipping.norms = 0.0, []

    @property
    def _scaler(self) -> Any:
        return getattr(self, "_amp_loss_scaler", None)

    def reset_center(self) -> None:
        """Give all ranks, all clients and the center client 0's weights; collective in the job.

        After weights were loaded in mid-run, which the old center would pull back.
        Optimizer states stay as they are. It waits.

        Raises
        ------
        CenterError
            On all ranks of a client that got no answer.
        """
        replica = self._prepare()
        if replica is not None:
            replica.reset_center()
