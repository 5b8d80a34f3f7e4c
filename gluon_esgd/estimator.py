"""Handlers of Gluon's Estimator that write files or stop: alike on all ranks."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from typing import Any, List, Optional, Set, Tuple

from mxnet.gluon.contrib.estimator import event_handler

from .durable import moved_to
from .metrics import OverRanks
from .ranks import broadcast_object
from .resume import client_path
from .topology import world
from .trainer import ElasticTrainer

__all__ = ["CheckpointHandler", "EarlyStoppingHandler"]


class EarlyStoppingHandler(event_handler.EarlyStoppingHandler):
    """Gluon's, by what `monitor` says over all ranks of the client, so that they stop together.

    Parameters
    ----------
    monitor : EvalMetric
        One of the estimator's metrics.
    *args, **kwargs
        As for Gluon's.
    """

    def __init__(self, monitor: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(OverRanks(monitor), *args, **kwargs)


class CheckpointHandler(event_handler.CheckpointHandler):
    """Gluon's, for the ranks of a client that give the same `model_dir`.

    Gluon's own lets every rank write, and remove, the same files. Here the leader of client 0
    writes ``{prefix}.params``, that of client K ``{prefix}.params.client{K}``, with running
    statistics averaged over the client; `save_states` writes the trainer's. Each client keeps its
    newest `max_checkpoints`. To resume, files have to be readable on the leaders only; a client
    that has none takes those of client 0.

    Parameters
    ----------
    model_dir : str
    *args, **kwargs
        As for Gluon's. `monitor` counts over all ranks of the client.
    """

    def __init__(self, model_dir: str, *args: Any, **kwargs: Any) -> None:
        os.makedirs(model_dir, exist_ok=True)  # Gluon's fails where another rank is faster
        super().__init__(model_dir, *args, **kwargs)
        monitor: Any = getattr(self, "monitor", None)
        if monitor is not None:
            self.monitor = OverRanks(monitor)

    def _save_symbol(self, estimator: Any) -> None:
        if world().is_main:
            super()._save_symbol(estimator)

    def _save_params_and_trainer(self, estimator: Any, file_prefix: str) -> None:
        path = os.path.join(self.model_dir, file_prefix)
        if isinstance(estimator.trainer, ElasticTrainer):
            estimator.trainer.average_running_stats()
        estimator.trainer.save_states(path + ".states")
        # Last: who finds parameters finds all of the checkpoint.
        world().on_leader(lambda: _write(estimator.net, path))
        if "best" not in file_prefix:
            self.saved_checkpoints.append(file_prefix)
        if len(self.saved_checkpoints) > self.max_checkpoints:
            oldest = os.path.join(self.model_dir, self.saved_checkpoints.pop(0))
            world().on_leader(lambda: _remove(oldest))

    def _resume_from_checkpoint(self, estimator: Any) -> None:
        found = world().broadcast(self._newest())
        self.trained_epoch: int
        self.trained_batch: int
        self.trained_epoch, self.trained_batch = found or (-1, -1)
        if found is None:
            estimator.logger.info("CheckpointHandler: no checkpoint found, training from scratch")
            return
        for unit, trained in (("epoch", self.trained_epoch), ("batch", self.trained_batch)):
            wanted = getattr(estimator, f"max_{unit}")
            if wanted and trained >= wanted - 1:
                raise ValueError(
                    f"{self.model_dir} has a checkpoint after {trained + 1} of {wanted} {unit}s: "
                    "nothing is left to train; use resume_from_checkpoint=False or more "
                    f"{unit}s"
                )
            if wanted:
                setattr(estimator, f"max_{unit}", wanted - trained - 1)
        prefix = f"{self.model_prefix}-epoch{self.trained_epoch}batch{self.trained_batch}"
        path = os.path.join(self.model_dir, prefix)
        _load(estimator, path)
        estimator.trainer.load_states(path + ".states")
        estimator.logger.info("CheckpointHandler: resumed from %s", prefix)

    def _newest(self) -> Optional[List[int]]:
        """Epoch and batch of the newest checkpoint of all clients that have any, else of client 0.

        What other ranks than the leader find is not used.
        """
        saved = [self._saved(client) for client in range(world().num_clients)]
        found = set.intersection(*[each for each in saved if each] or [set()]) or saved[0]
        return list(max(found)) if found else None

    def _saved(self, client: int) -> Set[Tuple[int, ...]]:
        name = re.escape(client_path(client, f"{self.model_prefix}-epoch0batch0.params"))
        any_number = name.replace("epoch0batch0", r"epoch(\d+)batch(\d+)")
        matches = [re.fullmatch(any_number, file) for file in os.listdir(self.model_dir)]
        return {tuple(map(int, match.groups())) for match in matches if match}


def _own(path: str) -> str:
    return client_path(world().client, path)


def _write(net: Any, path: str) -> None:
    """All or nothing: a reader never finds half of the parameters."""
    with moved_to(_own(path + ".params")) as beside:
        net.save_parameters(str(beside))


def _remove(path: str) -> None:
    for kind in (".params", ".states"):
        with suppress(FileNotFoundError):
            os.remove(_own(path + kind))


def _load(estimator: Any, path: str) -> None:
    """Load the leader's file on every rank, wherever it lies; collective."""
    me, content = world(), [b""]

    def read() -> None:
        own = _own(path + ".params")
        with open(own if os.path.exists(own) else path + ".params", "rb") as file:
            content[0] = file.read()

    me.on_leader(read)
    content = broadcast_object(content)
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "params")
        with open(copy, "wb") as file:
            file.write(content[0])
        estimator.net.load_parameters(copy, ctx=estimator.context)
