"""`TrainingLog`: a bar and curves in two lines of a script."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from types import TracebackType
from typing import (
    Any,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Type,
    TypeVar,
    Union,
)

from mxnet import nd
from mxnet.gluon import Trainer
from tqdm import tqdm

from ..topology import world
from .ends import End, arrays_of
from .gauges import Gauges

__all__ = ["TrainingLog"]

Value = Union[float, nd.NDArray]
Batch = TypeVar("Batch")


class TrainingLog:
    """Shows how training goes: a bar on the main rank, curves by the leader of each client.

    Not collective, but meant for every rank: those with nothing to show show nothing.
    Values given as NDArray are added up in the engine and read every `every` steps; the
    steps between do not wait for the network. The read also bounds, on every rank, how far
    Python runs ahead of the engine, and with it the memory that waiting batches take.

    Parameters
    ----------
    trainer : Trainer, optional
        Its learning rate and, for an `ElasticTrainer`, its counters become curves; when its weights
        are done says what `batches` counts.
    steps : int, optional
        Steps to come, for the bar.
    logdir : str, optional
        Folder for TensorBoard; client K writes into ``client{K}`` in it. No curves unless given.
    every : int, default 10
        Steps between two points of the curves.
    first_step : int, default 0
        Steps that were made before, as of a run that goes on from a checkpoint.

    Attributes
    ----------
    step : int
        Steps made, which is where the next point is drawn.
    samples : int
        Of this rank, since the log was made.
    seconds, input_s : float
        Since the log was made, or since `batches` if no step came before, without its pauses; and
        how much of it the network waited for a batch of `batches`.

    Examples
    --------
    >>> with TrainingLog(trainer, steps=1000, logdir="runs") as log:  # doctest: +SKIP
    ...     for data, label in batches:
    ...         loss = train(data, label)
    ...         log.update(loss, len(data))
    """

    def __init__(
        self,
        trainer: Optional[Trainer] = None,
        steps: Optional[int] = None,
        logdir: Optional[str] = None,
        *,
        every: int = 10,
        first_step: int = 0,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every!r} must be 1 or more")
        self._world = me = world()
        self.step, self._every = first_step, every
        self.samples, self.input_s = 0, 0.0
        self._began, self._closed = time.monotonic(), 0.0
        self._epoch_before = 0, 0.0
        self._trainer, self._gauges = trainer, Gauges(trainer)
        self._last: List[nd.NDArray] = []  # values of the last step, where there is no trainer
        self._writer: Any = None
        if logdir is not None and me.is_leader:
            from tensorboardX import SummaryWriter

            self._folder = os.path.join(logdir, f"client{me.client}")
            # What a run that was killed has drawn beyond its checkpoint is drawn again.
            purge = {"purge_step": first_step} if first_step else {}
            self._writer = SummaryWriter(self._folder, **purge)
        # Where lines are kept, in a log, a bar that moves ten times a second is ten lines.
        pace_s = 0.1 if sys.stderr.isatty() else 2.0
        self._bar = tqdm(
            total=steps, initial=first_step, unit="step", disable=not me.is_main, mininterval=pace_s
        )
        self._shows = self._writer is not None or me.is_main
        self._clear()

    def _clear(self) -> None:
        self._sums: Dict[str, Value] = {}
        self._count = 0
        self._before = self.samples, self.input_s
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds from making the log, or the first `batches`, to closing it, without pauses."""
        return (self._closed or time.monotonic()) - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the time inside, as of a validation, out of that of the steps; waits for these."""
        nd.waitall()
        start = time.monotonic()
        try:
            yield
        finally:
            pause = time.monotonic() - start
            self._start += pause
            self._began += pause

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Go through `batches`, and count for how long the network waits for each as input.

        That is from when Python asks for the batch, or from when the network has done what it was
        given before where that is later: sources of batches wait for MXNet's engine, too. Without
        a trainer what `update` was given last stands for the network.

        Where no step was made before, the log's time begins here: a run that goes on may have
        loaded a checkpoint, and left out what was done already.
        """
        iterator = iter(batches)
        if not self.samples:
            self._began = self._start = time.monotonic()
        while True:
            start = time.monotonic()
            end = End(self._last if self._trainer is None else arrays_of(self._trainer))
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.input_s += max(0.0, time.monotonic() - max(start, end.time))
            yield batch

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        # After a failure the engine may hold an error of its own: do not ask it for values.
        self.close(flush=kind is None)

    def update(self, loss: Value, batch_size: int, **values: Value) -> None:
        """Count one step of this rank.

        Parameters
        ----------
        loss : float or NDArray
            An NDArray is averaged over its elements.
        batch_size : int
            Samples of this rank in the step.
        **values : float or NDArray
            More to show, such as ``accuracy=``; means over the steps between two points.
        """
        self.step += 1
        self.samples += batch_size
        self._last = [v for v in (loss, *values.values()) if isinstance(v, nd.NDArray)]
        if not self._shows:
            if self.step % self._every == 0 and isinstance(loss, nd.NDArray):
                loss.wait_to_read()
            return
        for name, value in {"loss": loss, **values}.items():
            mean = value.astype("float32").mean() if isinstance(value, nd.NDArray) else value
            self._sums[name] = self._sums[name] + mean if name in self._sums else mean
        self._count += 1
        if self.step % self._every == 0:
            self._show()
        self._bar.update()

    def _show(self) -> None:
        means = {name: _number(total) / self._count for name, total in self._sums.items()}
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = (self.samples - self._before[0]) / seconds
        # Ranks of a client go in lockstep: the client is `size` times as fast as this rank.
        means["images_per_s"] = self._world.size * rate
        self._bar.set_postfix({k: f"{v:.4g}" for k, v in means.items()}, refresh=False)
        if self._writer is not None:
            rates = {"rank": rate, "job": self._world.num_workers * rate}
            self._draw({**means, **{f"images_per_s/{whose}": r for whose, r in rates.items()}})
            self._draw({**self._times(seconds), **self._gauges.values()})
        self._clear()

    def _times(self, seconds: float) -> Dict[str, float]:
        input_s = self.input_s - self._before[1]
        own = {"step": seconds, "input": input_s, "compute": seconds - input_s}
        means = {f"time/{name}_s": value / self._count for name, value in own.items()}
        return {**means, **self._gauges.times(self._count)}

    def _draw(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            self.scalar(name, value)

    def scalar(self, name: str, value: Value) -> None:
        """Add a point to the curve `name` at the present step; leaders only, others ignore it."""
        if self._writer is not None:
            self._writer.add_scalar(name, _number(value), self.step)

    def epoch(self, number: int, **values: Value) -> None:
        """Keep and show what came of an epoch; leaders only, others ignore it.

        The values become curves, and a line of JSON in ``client{K}/epochs.jsonl`` in the log's
        folder, with epoch, step, the time in seconds since 1970, and the client's images/s in the
        epoch; the main rank prints them.
        """
        samples, seconds = self._epoch_before
        self._epoch_before = self.samples, self.seconds
        rate = self._world.size * (self.samples - samples) / max(self.seconds - seconds, 1e-9)
        found = {name: _number(value) for name, value in values.items()}
        if self._world.is_main:
            told = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            self._bar.write(f"epoch {number}: {told}, {rate:,.0f} images/s")
        if self._writer is None:
            return
        self._draw(found)
        line = {"epoch": number, "step": self.step, "time": time.time(), "images_per_s": rate}
        with open(os.path.join(self._folder, "epochs.jsonl"), "a") as file:
            file.write(json.dumps({**line, **found}) + "\n")

    def totals(self) -> Dict[str, float]:
        """Return what the client did since the log was made; collective in the client.

        Rates are those up to `close`, counters as they are now.

        Returns
        -------
        dict
            ``samples``, ``seconds``, ``images_per_s``, ``input_share`` of the time for which the
            ranks' networks waited for `batches`, and the trainer's counters: bytes and samples over
            all ranks, all else of the leader.
        """
        seconds = max(self.seconds, 1e-9)
        mine = {
            "samples": self.samples,
            "seconds": seconds,
            "images_per_s": self.samples / seconds,
            "input_share": self.input_s / seconds,
            **self._gauges.counters(),
        }
        ranks = self._world.allgather(mine)
        summed = [name for name in mine if name.endswith("_bytes")] + ["samples", "images_per_s"]
        found = {**ranks[0], **{name: sum(rank[name] for rank in ranks) for name in summed}}
        found["input_share"] = sum(rank["input_share"] for rank in ranks) / len(ranks)
        return found

    def hyperparameters(
        self, values: Mapping[str, Union[str, float, bool]], metrics: Sequence[str] = ("loss",)
    ) -> None:
        """Enter this run into TensorBoard's table of hyperparameters; leaders only.

        Parameters
        ----------
        values : mapping of str to str, float or bool
        metrics : sequence of str
            Names of curves whose last value the table shows.
        """
        if self._writer is None:
            return
        from tensorboardX.summary import hparams

        *entries, _ = hparams(dict(values), dict.fromkeys(metrics))  # the last is the run's end
        for entry in entries:
            self._writer.file_writer.add_summary(entry)

    def close(self, flush: bool = True) -> None:
        """End bar and curves, with the steps since the last point if `flush`; twice is no harm."""
        try:
            if flush and self._count and self._shows:
                self._show()
        finally:
            self._closed = self._closed or time.monotonic()
            self._bar.close()
            if self._writer is not None:
                self._writer.close()
            self._writer, self._shows = None, False


def _number(value: Value) -> float:
    return float(value.asscalar()) if isinstance(value, nd.NDArray) else float(value)
