"""`TrainingState`: save all of a training in one call, and a loop that survives restarts."""

from __future__ import annotations

import logging
import os
from typing import Any, Callable, Iterable, Iterator, List, Optional

from mxnet import gluon

from ..collectives import agree
from ..topology import World, world
from ..trainer import ElasticTrainer
from .arguments import checked_count, checked_every, checked_folder
from .choice import same_shares
from .content import Checkpoint
from .decisions import Decisions
from .position import counted_in
from .preemption import STOP
from .rest import Rest, batch_size_of
from .store import Loaded, Store
from .whole import Place, Whole

__all__ = ["TrainingState"]

_log = logging.getLogger(__name__)

_TERMINATED = 128 + 15  # the exit code of what SIGTERM has ended


class TrainingState:
    """All of a training that its script would miss after a restart, in checkpoints.

    That is the network with its running statistics, what the trainer remembers (`save_states`),
    the center, epoch and batch, the sampler's epoch, and random states of every rank. Each client
    has a folder of its own, ``{folder}/client{K}``, which its leader writes. A checkpoint is one
    file that is there as a whole or not at all: arrays and JSON, with checksums, nothing that is
    run when it is read. Making one is not collective; all methods are, in the client.

    Parameters
    ----------
    net : gluon.Block
    trainer : ElasticTrainer
        Of parameters of `net`.
    sampler : object, optional
        With ``epoch`` and ``set_epoch(epoch)``, as `ShardSampler`. `epochs` sets its epoch, and
        lets it share the data anew (``share_anew()``) where clients have come or gone.
    folder : str, optional
        ``checkpoints`` in the folder of a job of ``gluon-esgd run``; in any other job it must be
        given. All clients give the same. Only leaders need to see it.
    keep : int, default 3
        So many of the newest are kept.
    every_steps, every_s : optional
        In `batches`, save also this many optimizer steps, or seconds by the leader's clock, after
        the last save.
    background : bool, default False
        Write on a thread, from copies: the training waits for these only. The next save waits for
        the last one, and raises what it met.

    Attributes
    ----------
    epoch, batch : int
        Epochs done, and batches done of the next one.

    Raises
    ------
    TypeError, ValueError
        Where the argument is wrong, by name.

    Examples
    --------
    >>> state = TrainingState(net, trainer, sampler=sampler)  # doctest: +SKIP
    >>> for epoch in state.epochs(90):
    ...     for data, label in state.batches(loader):
    ...         backward(data, label)
    ...         trainer.step(len(data))
    """

    def __init__(
        self,
        net: gluon.Block,
        trainer: ElasticTrainer,
        *,
        sampler: Any = None,
        folder: Optional[str] = None,
        keep: int = 3,
        every_steps: Optional[int] = None,
        every_s: Optional[float] = None,
        background: bool = False,
    ) -> None:
        if not isinstance(trainer, ElasticTrainer):
            raise TypeError(f"trainer={type(trainer).__name__} must be an ElasticTrainer")
        self._world: World = world()
        self._trainer, self._sampler = trainer, sampler
        root = checked_folder(folder, self._world.settings.job_dir)
        self._store = Store(self._world, root, checked_count("keep", keep), background)
        self._whole = Whole(self._world, net, trainer, self._store)
        self._every_steps, every_s = checked_every(every_steps, every_s)
        self._decisions = Decisions(self._world, self._every_steps, every_s)
        self._rest, self._loaded = Rest(), False
        self._in_epoch = self._passed = self._in_batch = False
        self._goes_on = False  # inside an epoch, with the shares that it began with
        self._batch_size: Optional[int] = None  # of the batches that are counted
        self._shared_by = self._world.num_clients, self._world.client
        self._stepped = 0  # batches done at the last update
        self.epoch = self.batch = 0

    @property
    def folder(self) -> str:
        """Where this client's checkpoints are."""
        return self._store.folder

    def epochs(self, epochs: int) -> Iterator[int]:
        """Go through the epochs that are left of `epochs`, and save at the end of each.

        At first the newest checkpoint that is whole is loaded, where there is one (unless `load`
        was called); a run that was saved inside an epoch goes on in it. Until the loop ends SIGTERM
        on any rank lets all ranks of the client (of the job, where one MPI job is split) save after
        the same step of `batches`, or at the end of the epoch, and raise ``SystemExit(143)``.
        A second SIGTERM ends the process at once.

        Yields
        ------
        int
            Number of the epoch, from 0 on.

        Raises
        ------
        OSError, ValueError
            On all ranks of the client: what `save` and `load` raise; ranks with another number of
            epochs or other settings.
        """
        total = checked_count("epochs", epochs, low=0)
        said: List[List[Any]] = [["epochs", total], ["every_steps", self._every_steps]]
        agree(self._world.control, "setting of the loop", said)
        if not self._loaded:
            self.load()
        self._decisions.open()
        self._trainer._after_step = self._after_step
        self._rescue_by(self._rescue)
        try:
            with self._decisions.signal.watched():
                while self.epoch < total:
                    self._begin_epoch()
                    yield self.epoch
                    self._end_epoch()
                self._decisions.close()
                self.wait()
        finally:
            self._trainer._after_step = None
            self._rescue_by(None)

    def _rescue_by(self, rescue: Optional[Callable[[], None]]) -> None:
        if self._trainer._replica is not None:
            self._trainer._replica.rescue_by(rescue)

    def _begin_epoch(self) -> None:
        self._in_epoch, self._passed = True, False
        self._decisions.begin_epoch()
        if self._sampler is None:
            return
        if not self._goes_on and hasattr(self._sampler, "share_anew"):
            self._shared_by = self._sampler.share_anew()
        self._sampler.set_epoch(self.epoch)

    @property
    def _sharing_clients(self) -> int:
        """How many clients share the data; 0 where this one's part is not that of its number."""
        clients, place = self._shared_by
        return clients if place == self._world.client else 0

    def _end_epoch(self) -> None:
        self._in_epoch = self._passed = self._goes_on = False
        self.epoch, self.batch = self.epoch + 1, 0
        self._rest.end()
        self.save()
        if self._decisions.stops_now():
            self._leave()

    def batches(
        self,
        loader: Iterable[Any],
        through: Callable[[Iterator[Any]], Iterator[Any]] = iter,
    ) -> Iterator[Any]:
        """Go through this epoch's batches, those after the ones that are done already.

        Between two of them, after an optimizer step, checkpoints of `every_steps` and `every_s` are
        saved and SIGTERM is acted on. All ranks make as many steps.

        Parameters
        ----------
        loader : iterable
            A ``DataLoader``, or anything that can be gone through in each epoch. What was done is
            left out, with the order that it had: from a ``DataLoader`` without being loaded. Where
            batches have another size now, `batch` becomes the number of these from this call on.
        through : callable, optional
            What is left goes through it, such as `TrainingLog.batches`: neither what is left out
            nor saving is then counted as input.

        Raises
        ------
        RuntimeError
            On this rank: outside of `epochs`, or a second time in one epoch.
        OSError, ValueError
            On all ranks of the client: what `save` raises. On all ranks of the client, of the job
            where one MPI job is split: a run that goes on inside an epoch has another batch size,
            by which what was done cannot be divided.
        """
        if not self._in_epoch or self._passed:
            raise RuntimeError(
                "batches() counts one pass in each epoch of epochs(): call it inside that loop, "
                "once in each epoch"
            )
        size = batch_size_of(loader)
        if self._goes_on:
            done = self.epoch, self.batch, self._batch_size
            self.batch = counted_in(self._world, *done, size)
        self._batch_size, self._goes_on = size, False
        self._passed, self._stepped = True, self.batch
        return self._counted(through(self._rest.of(loader, self.batch)))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for item in batches:
                self._in_batch = True
                yield item
                self._in_batch = False
                self.batch += 1
                self._act()
        finally:
            self._in_batch = False

    def _after_step(self) -> None:
        """After an update, also one of `join`: decide what is done after this batch."""
        if not self._passed:  # not a loop over `batches`
            return
        self._stepped = self.batch + self._in_batch
        self._decisions.after_step()
        if not self._in_batch:  # this rank has no batches left, others do
            self._act()

    def _act(self) -> None:
        decided = self._decisions.take()
        if decided:
            self.save()
        if decided & STOP:
            self._leave()

    def _leave(self) -> None:
        self.wait()
        self._decisions.close()
        if self._world.is_leader:
            _log.warning(
                "client %d leaves after SIGTERM, in epoch %d after batch %d; it goes on from there "
                "when it is started again",
                self._world.client, self.epoch, self.batch,
            )  # fmt: skip
        raise SystemExit(_TERMINATED)

    def save(self) -> str:
        """Save a checkpoint and return its path; collective in the client, waits.

        It completes the client's exchange in flight, and seeds MXNet's random numbers anew with a
        number drawn from them, since their state cannot be read.

        Raises
        ------
        OSError, ValueError
            On all ranks of the client: it cannot be written, or in the background the last one
            could not; the optimizer keeps what a file does not hold.
        CollectiveError, CenterError
            On all ranks of the client.
        """
        path = self._save(self.batch)
        self._decisions.saved()
        return path

    def _save(self, batch: int) -> str:
        """Save with `batch` batches of this rank done."""
        self.wait()
        states = self._trainer._collect_states()
        mine = {**self._rest.random_states(), "batch": batch, "batch_size": self._batch_size}
        sampler_epoch = None if self._sampler is None else int(self._sampler.epoch)
        place = Place(self.epoch, self._sharing_clients, sampler_epoch)
        return self._whole.save(place, states, mine)

    def _rescue(self) -> None:
        """Save what was before the step in which the other clients were lost; see `Replica`.

        Whatever is in the way of that must not hide why it was necessary.
        """
        if not self._passed:  # between batches of its own nobody knows what was done
            return
        try:
            path = self._save(self._stepped)
            self.wait()
        except Exception as error:
            _log.error("what was before this step could not be saved: %s", error)
            return
        if self._world.is_leader:
            _log.warning(
                "the other clients are lost in this step: what was before it is in %s", path
            )

    def wait(self) -> None:
        """Return when the last checkpoint is written; collective in the client.

        Raises
        ------
        OSError
            On all ranks of the client: it could not be written.
        """
        self._store.wait()

    def load(self, path: Optional[str] = None) -> Optional[str]:
        """Go on from a checkpoint and return its path; waits.

        Collective in the client, and in the job where one MPI job is split.

        Without a `path` it is the newest that is whole, and None where nothing was saved.
        Networks and trainers of other numbers of clients, ranks and devices can take it. Where
        clients or ranks are others than before, all take client 0's, an epoch that was begun
        begins again, since the data are shared anew, and random numbers are the script's.

        Parameters
        ----------
        path : str, optional
            A file of `save`, readable on the leader.

        Raises
        ------
        OSError, ValueError
            On all ranks of the client: it cannot be read, is damaged or none; it is of another
            network or optimizer, which is named; clients of a split job found different ones.
            Network and trainer are as they were.
        RuntimeError
            Inside ``with trainer.center():``.
        """
        self.wait()
        found = self._whole.load(None if path is None else os.fspath(path))
        self._loaded = True
        if found is None:
            return None
        self._take(*found)
        return found[1].path

    def _take(self, checkpoint: Checkpoint, found: Loaded) -> None:
        me, own = self._world, found.own
        self._whole.put(checkpoint, own)
        same = same_shares(checkpoint, self._sharing_clients, me.size)
        self.epoch, self.batch = checkpoint.epoch, 0
        if self._sampler is not None and checkpoint.sampler_epoch is not None:
            self._sampler.set_epoch(checkpoint.sampler_epoch)
        self._goes_on = same and checkpoint.batch > 0
        if same:
            mine = checkpoint.ranks[me.rank]
            self.batch, self._batch_size = mine["batch"], mine["batch_size"]
        if same and own:
            self._rest.resume(checkpoint.ranks[me.rank])
        self._decisions.loaded()
        if me.is_leader:
            again = "" if same or not checkpoint.batch else ", which begins again: others share it"
            place = f"epoch {self.epoch}, batch {self.batch}{again}"
            _log.info("client %d goes on from %s: %s", me.client, found.path, place)
