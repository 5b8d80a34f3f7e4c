"""Network and trainer of a client, to its checkpoints and from them."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx
from mxnet import gluon

from ..resume import on_leader
from ..states import States
from ..states import check as check_states
from ..topology import World
from ..trainer import ElasticTrainer
from . import network
from .content import Checkpoint, read
from .random_states import in_arrays
from .store import Loaded, Store
from .together import raise_together

__all__ = ["Place", "Whole"]


class Place(NamedTuple):
    """Where a client stands, but for what its ranks say; see `Checkpoint`.

    Attributes
    ----------
    epoch, num_clients : int
    sampler_epoch : int or None
    """

    epoch: int
    num_clients: int
    sampler_epoch: Optional[int]


class Whole:
    """All that a client brings into a checkpoint; all methods are collective in it.

    Parameters
    ----------
    world : World
    net : gluon.Block
    trainer : ElasticTrainer
    store : Store
    """

    def __init__(
        self, world: World, net: gluon.Block, trainer: ElasticTrainer, store: Store
    ) -> None:
        self._world, self._net, self._trainer, self._store = world, net, trainer, store

    def save(self, place: Place, states: Optional[States], mine: Dict[str, Any]) -> str:
        """Let the leader write a checkpoint, and return its path.

        Parameters
        ----------
        place : Place
        states : States or None
            Of the trainer; the leader's.
        mine : dict
            What `Checkpoint.ranks` holds of this rank.

        Raises
        ------
        OSError, ValueError
            On all ranks of the client: it cannot be made or written.
        """
        said = self._world.allgather([mine, network.own_statistics(self._net)])
        return self._store.save(lambda: self._checkpoint(place, states, said))

    def _checkpoint(self, place: Place, states: Optional[States], said: List[Any]) -> Checkpoint:
        assert states is not None, "the leader has them"
        return Checkpoint(
            **place._asdict(),
            batch=max(own["batch"] for own, _ in said),
            size=self._world.size,
            parameters=network.collect(self._net),
            statistics=[[network.statistics_array(d) for d in devices] for _, devices in said],
            ranks=[
                {**own, "now": in_arrays(own["now"]), "start": in_arrays(own["start"])}
                for own, _ in said
            ],
            states=states,
        )

    def load(self, path: Optional[str]) -> Optional[Tuple[Checkpoint, Loaded]]:
        """Return a checkpoint that fits on all ranks; None where nothing was saved.

        Collective in the job where one MPI job is split. Changes nothing: `put` does.

        Raises
        ------
        OSError, ValueError
            As `TrainingState.load`.
        """
        found = self._store.load(path, self._trainer.rule)
        checkpoint = None if found is None else self._checked(found)
        self._check_clients(checkpoint)
        return None if found is None or checkpoint is None else (checkpoint, found)

    def _checked(self, found: Loaded) -> Checkpoint:
        """The checkpoint, where it fits on every rank."""
        path, fault, checkpoint = found.path, None, None
        try:
            checkpoint = read(found.data, path)
            network.check(self._net, checkpoint, path)
            check_states(checkpoint.states, self._trainer._optimizer, self._trainer._params, path)
        except Exception as error:  # the others must not wait for this rank
            fault = str(error) if isinstance(error, ValueError) else f"{path}: {error!r}"
        raise_together(self._world, fault)
        assert checkpoint is not None
        return checkpoint

    def _check_clients(self, checkpoint: Optional[Checkpoint]) -> None:
        """In a split world clients that went on from other places would wait for each other."""

        def compare() -> None:
            mx.nd.waitall()  # leaders have one communicator for engine and main thread
            place = checkpoint and [checkpoint.epoch, checkpoint.batch]
            assert self._world.leaders is not None
            places = self._world.leaders.allgather(place, "the places of all clients")
            for client, other in enumerate(places):
                if other != places[0]:
                    raise ValueError(
                        f"client 0 goes on from epoch and batch {places[0]}, client {client} from "
                        f"{other}: give all clients one folder on a file system that they share"
                    )

        if self._world.settings.is_split:
            on_leader(self._world, compare)

    def put(self, checkpoint: Checkpoint, own: bool) -> None:
        """Put a checkpoint into network and trainer; `own` where this client wrote it."""
        network.put(self._net, checkpoint.parameters)
        network.put_statistics(self._net, checkpoint.statistics, self._world.rank, self._world.size)
        self._trainer._put_states(checkpoint.states, own=self._keeps_weights(own))

    def _keeps_weights(self, own: bool) -> bool:
        """Whether the client comes with its weights, and client 0 with its center.

        One that was started again while others trained on takes theirs.
        """
        settings = self._world.settings
        restarted = settings.life > 0 and settings.num_servers > 0
        return (own or self._world.client == 0) and not restarted
