"""This process's part in a distributed training: what a step needs from ranks and clients."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Callable, List, Optional, Sequence

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import Parameter

from .collectives import agree, names
from .counters import Counters
from .engine import lay_plain
from .errors import LostClientsError
from .exchange import CenterExchange
from .gradients import JOIN, PAIR, STEP, GradientReducer
from .job import Job
from .optim import check_optimizer, is_nesterov, keep_alike
from .parameters import Weights, broadcast, check_alike, contract, digest, follow_leader
from .policy import Policy
from .resume import collect_all, load_together, on_leader, put_in_place, save_together
from .rounds import ClientRounds
from .settings import PREFIX, Settings
from .states import Position, States

__all__ = ["Replica"]

_log = logging.getLogger(__name__)


class Replica:
    """One copy of the parameters among many; making one is collective in the client.

    Parameters
    ----------
    job : Job
    trainer : gluon.Trainer
        Has parameters, optimizer, and an updater for each device.
    order : sequence of int
        Positions of the trainer's parameters in the order in which the script gave them. For a
        network that is nearly the order of its forward pass, and buckets are filled from its end.
    policy : Policy
    counters : Counters

    Raises
    ------
    ValueError
        On all ranks, when they bring other parameters, settings or optimizers, and where the
        optimizer cannot do what is asked of it.
    """

    def __init__(
        self,
        job: Job,
        trainer: gluon.Trainer,
        order: Sequence[int],
        policy: Policy,
        counters: Counters,
    ) -> None:
        world, params, optimizer = job.world, trainer._params, trainer._optimizer
        _check_dense(params)
        if world.settings.algorithm not in names():
            raise ValueError(
                f"{PREFIX}ALGORITHM={world.settings.algorithm!r} must be one of "
                f"{', '.join(names())}"
            )
        self._job, self._world, self._params = job, world, params
        self._optimizer, self._updaters = optimizer, trainer._updaters
        self._policy, self._counters = policy, counters
        check_alike(params, world.control)
        self._order = world.broadcast(list(order))
        said = _settings(policy, world.settings) + _optimizer_settings(optimizer)
        agree(world.control, "setting", said)
        check_optimizer(
            optimizer,
            policy.rule,
            size=world.size,
            num_clients=world.num_clients,
            num_devices=len(self._updaters),
        )
        keep_alike(self._updaters)
        name = job.claim(policy)
        self._reducer: Optional[GradientReducer] = None
        self._reduced: List[Parameter] = []
        self._round_lengths: List[int] = []
        self._step = 0
        self._resumed = False
        self._started = False
        self._drop_gradient = self._ignored_stale = False
        self._rescue: Optional[Callable[[], None]] = None
        self._is_rescued = False
        link = job.link() if world.num_clients > 1 or policy.has_center else None
        self._link = link
        self._rounds = ClientRounds(world, link, name)
        self._exchange: Optional[CenterExchange] = None
        if policy.has_center:
            self._exchange = CenterExchange(world, job.lane, link, name, policy, counters)
        follow_leader(params, world.control, self._house_gradients)
        self._house_gradients()

    def prepare(self) -> None:
        """Raise what an earlier step met in the engine; at the first call, start together."""
        self._job.lane.check()
        if not self._started:
            self._start()

    def _start(self) -> None:
        """All ranks alike, then all clients alike."""
        world = self._world
        # Calls that clients make together must not meet another trainer's rounds at the agents.
        self._job.lane.wait()
        for param in self._params:
            param.list_data()  # Gluon's own error where one is not initialized
        check_alike(self._params, world.control)
        replaced = self._equal_ranks()
        self._weights = Weights(self._params, self._optimizer, self._updaters)
        agreed = contract(self._params, self._order, self._policy.rule)
        agreed.update(self._policy.contract())
        if world.settings.is_split:
            agreed.update(self._policy.terms())
        if self._exchange is not None:
            replaced |= self._exchange.start(self._weights, agreed)
        elif world.num_clients > 1:
            replaced |= self._rounds.start(self._weights, agreed)
        # A gradient that belongs to other weights counts nothing.
        self._drop_gradient = replaced
        self._started = True

    def _equal_ranks(self) -> bool:
        """Give ranks whose weights differ the leader's; whether this rank's were replaced.

        They differ where a script has set weights on one rank only.
        """
        world = self._world
        if world.size == 1:
            return False
        what = f"the check of weights, step {self._step}"
        digests = world.allgather(digest(self._params), what)
        others = [r for r, d in enumerate(digests) if d != digests[0]]
        if others:
            if world.is_leader:
                _log.warning("ranks %s had other weights than rank 0 and took its", others)
            broadcast(self._params, world.control)
        return world.rank in others

    def _trainable(self) -> List[Parameter]:
        params = [self._params[i] for i in self._order]
        return [p for p in params if p.grad_req != "null"]

    def _house_gradients(self) -> None:
        """Let gradients live in buckets from before the first backward pass; collective.

        Called again when parameters are initialized anew.
        """
        if all(p._data is not None for p in self._params):
            self._make_reducer(self._trainable())
            assert self._reducer is not None
            self._reducer.house()

    def _make_reducer(self, trainable: List[Parameter]) -> None:
        if self._reducer is not None and trainable == self._reduced:
            return
        world, policy, self._reduced = self._world, self._policy, trainable
        between = self._exchange is None and world.num_clients > 1
        self._reducer = GradientReducer(
            trainable,
            world.comm,
            self._job.lane,
            self._counters,
            replace(world.settings, compression=policy.compression),
            between=self._rounds if between else None,
        )

    def _current_reducer(self) -> GradientReducer:
        """The reducer for what has gradients now; collective when that has changed."""
        trainable = self._trainable()
        if trainable != self._reduced:
            check_alike(trainable, self._world.control)
        self._make_reducer(trainable)
        reducer = self._reducer
        assert reducer is not None
        reducer.settle()
        lengths = reducer.lengths() if reducer.between is not None else self._round_lengths
        if lengths != self._round_lengths:
            self._round_lengths = lengths
            self._job.lane.wait()
            if lengths:
                what = f"the places of gradients, step {self._step + 1}"
                self._world.on_leader(lambda: self._rounds.lay(lengths), what)
        return reducer

    def reduce(self, samples: float, ignore_stale_grad: bool) -> bool:
        """Push the collectives that make gradients means over the samples of all ranks.

        Returns
        -------
        bool
            False where this process is alone in its sums: gradients are as they were.
        """
        if not self._current_reducer().needed:
            self._zero_dropped()
            return False
        stale, error = self._stale(), None
        if ignore_stale_grad:
            self._share_freshness(stale)
        elif stale:
            # The others must not wait for the rank that is about to raise.
            error = f"gradient of {self._reduced[stale[0]].name} was not updated by backward"
        self._push_reduction(samples, stale, error)
        return True

    def mean_over_ranks(self) -> None:
        """Push the collectives that make gradients their mean over ranks, stale or not."""
        if self._current_reducer().needed:
            self._push_reduction(1, doing=PAIR)
        else:
            self._zero_dropped()

    def _push_reduction(
        self,
        weight: float,
        stale: Sequence[int] = (),
        error: Optional[str] = None,
        doing: str = STEP,
    ) -> None:
        assert self._reducer is not None
        weight = 0 if self._drop_gradient else weight
        self._reducer.reduce(self._step + 1, weight, stale, error, self._rates, doing)
        if self._rescue is not None and self._reducer.between is not None:
            self._wait_for_clients(self._rescue)

    def rescue_by(self, rescue: Optional[Callable[[], None]]) -> None:
        """Call `rescue` on all ranks of the client, where the other clients are lost in a step.

        Nothing of that step has been updated then, and `collect_states` gives what was before it.
        For this each step waits for the sum over clients. Has no effect but under rule ``sgd``.
        """
        self._rescue = rescue

    def _wait_for_clients(self, rescue: Callable[[], None]) -> None:
        try:
            self._job.lane.wait()
        except LostClientsError:
            self._is_rescued = True
            rescue()
            raise

    @property
    def _rates(self) -> List[float]:
        # Where there is only a schedule, MXNet sets no learning rate.
        return [float(self._optimizer.lr or 0), float(self._optimizer.wd)]

    @property
    def can_join(self) -> bool:
        """Whether there are others, with whom gradients are reduced."""
        others = self._world.size > 1 or (self._exchange is None and self._world.num_clients > 1)
        return others and bool(self._trainable())

    def follow(self) -> bool:
        """Take part, without samples, in the next step of those that have not joined; waits.

        Returns
        -------
        bool
            False when all have joined: nobody makes a step. Else it is to be updated like them.
        """
        if self._ignored_stale:
            raise RuntimeError(
                "join() after steps with ignore_stale_grad=True, in which ranks compare what is "
                "fresh: a rank that has joined has nothing to compare; give all ranks equally many "
                "batches, or step without it"
            )
        reducer = self._current_reducer()
        self._push_reduction(0, doing=JOIN)
        self._job.lane.wait()
        if reducer.all_joined:
            return False
        rates = list(reducer.rates_of_others)
        if rates and rates != self._rates:  # a script of theirs has changed them
            self._optimizer.lr, self._optimizer.wd = rates
        for param in self._reduced:
            for data in param.list_data():
                data._fresh_grad = True
        return True

    def _zero_dropped(self) -> None:
        for param in self._reduced if self._drop_gradient else ():
            for grad in param.list_grad():
                grad[:] = 0

    def check_update(
        self, batch_size: float, max_norms: Sequence[float], ignore_stale_grad: bool
    ) -> None:
        """Push the check that all ranks update, and have clipped, with the same numbers."""
        said = [float(batch_size), *max_norms]
        what = "batch_size of update() and max_norm of clip_global_norm()"
        self._current_reducer().check_equal(said, what)
        if ignore_stale_grad:
            self._share_freshness(self._stale())

    def _stale(self) -> List[int]:
        return [
            i
            for i, param in enumerate(self._reduced)
            if not all(data._fresh_grad for data in param.list_data())
        ]

    def _share_freshness(self, stale: List[int]) -> None:
        """What is fresh on any rank is updated on all; waits."""
        self._ignored_stale = True
        what = f"ignore_stale_grad of step {self._step + 1}"
        everywhere = set(stale).intersection(*self._world.allgather(stale, what))
        for i in set(stale) - everywhere:
            for data in self._reduced[i].list_data():
                data._fresh_grad = True

    def before_update(self) -> None:
        """See that the optimizer does the same on all ranks, whatever they did before.

        MXNet's kernel of NAG writes the weight and then reads it for the momentum, unless oneDNN
        has laid it out anew, as a forward pass outside of ``record()`` does: then it reads the
        old one. When the layout goes back is left to chance, so it is brought back here.
        """
        if self._world.num_workers > 1 and is_nesterov(self._optimizer):
            for param in self._reduced:
                for data in param.list_data():
                    lay_plain(data)

    def after_update(self) -> None:
        """Exchange with the center what is due after an update; pushes, does not wait."""
        self._step += 1
        if self._link is not None:
            self._link.report(self._step, self._counters)
        self._drop_gradient = False
        self._weights.find_masters()
        if self._exchange is not None:
            self._exchange.after_update(self._step)
        else:
            self._counters.server_bytes = self._rounds.server_bytes

    def show_center(self, sync: bool) -> List[List[mx.nd.NDArray]]:
        """Put the center into the network and return own weights for `show_own`; waits."""
        self._equal_ranks()
        if self._exchange is not None:
            flat = self._exchange.pull(sync)
            if self._world.is_leader and not (self._counters.exchanges or self._resumed):
                _log.warning("this client has not exchanged with the center yet")
        else:
            self._job.lane.wait()
            flat = self._rounds.mean_statistics(self._weights)
        own = self._weights.own()
        self._weights.write(flat)
        return own

    def show_own(self, own: List[List[mx.nd.NDArray]]) -> None:
        """Put this replica's own weights back."""
        self._weights.restore(own)

    def finish(self) -> None:
        """Complete what is in flight and make a last exchange; waits."""
        self._job.lane.wait()
        self._equal_ranks()
        if self._exchange is not None:
            self._exchange.exchange_now()
        self._job.lane.wait()

    def save_states(self, fname: str, scaler: Any) -> None:
        """Write this client's states file, see `ElasticTrainer.save_states`; waits."""
        position = self._position()
        save_together(self._world, fname, lambda: self._states(position, scaler))

    def collect_states(self, scaler: Any) -> Optional[States]:
        """Return what a states file would hold, on the leader; collective in the client, waits."""
        position, found = self._position(), []
        on_leader(self._world, lambda: found.append(self._states(position, scaler)))
        return found[0] if found else None

    def _position(self) -> Position:
        if not self._is_rescued:  # then it has failed, with nothing left in it
            self._job.lane.wait()
        if self._exchange is not None:
            return self._exchange.position(self._step)
        return Position(self._step, self._step)

    def _states(self, position: Position, scaler: Any) -> States:
        return collect_all(self._optimizer, self._updaters[0], self._params, position, scaler)

    def load_states(self, fname: str, scaler: Any) -> None:
        """Go on from a states file, see `ElasticTrainer.load_states`; waits."""
        self._job.lane.wait()
        states, own = load_together(self._world, fname, self._optimizer, self._params)
        self.put_states(states, own, scaler)

    def put_states(self, states: States, own: bool, scaler: Any) -> None:
        """Go on from checked `states`; collective in the client, waits.

        Unless they are this client's `own`, it takes the center like a new client.
        """
        self._job.lane.wait()
        trainer = self._optimizer, self._updaters, self._params, scaler
        put_in_place(states, *trainer, aloud=self._world.is_leader)
        updates = self._optimizer.num_update
        position = states.position or Position(updates, updates)
        self._step, self._resumed = position.step, True
        if self._exchange is not None:
            self._exchange.resume(position, own)
        self._started = False  # clients meet again at the next step

    def reset_center(self) -> None:
        """Give all ranks, all clients and the center client 0's weights; waits."""
        self._job.lane.wait()
        self._equal_ranks()
        self._weights.follow_parameters()
        if self._exchange is not None:
            self._exchange.reset()
        elif self._world.num_clients > 1:
            self._rounds.seed(self._weights)


def _settings(policy: Policy, settings: Settings) -> List[List[Any]]:
    """What all ranks of a client must have alike, or their collectives part."""
    interval = "a function" if callable(policy.interval) else policy.interval
    return [
        ["rule", policy.rule],
        ["interval", interval],
        ["alpha", policy.alpha],
        ["lazy", policy.lazy],
        ["outer", [policy.outer.momentum, policy.outer.learning_rate]],
        ["compression", policy.compression],
        ["bucket_bytes", settings.bucket_bytes],
        ["algorithm", settings.algorithm],
    ]


def _optimizer_settings(optimizer: Any) -> List[List[Any]]:
    """What ranks must have alike in their optimizers, or their weights part.

    Learning rate and weight decay, which scripts change, are compared in every step.
    """
    names = ("momentum", "clip_gradient", "rescale_grad", "multi_precision")
    numbers = [[f"optimizer's {name}", str(getattr(optimizer, name, None))] for name in names]
    return [["optimizer", type(optimizer).__name__], *numbers]


def _check_dense(params: Sequence[Parameter]) -> None:
    for param in params:
        if (param._stype, param._grad_stype) != ("default", "default"):
            raise ValueError(
                f"parameter {param.name!r} is row-sparse, which a distributed run does not "
                "exchange; make it dense (sparse_grad=False, stype='default')"
            )
