"""What is read off a trainer and its process each time that a point of the curves is drawn."""

from __future__ import annotations

import os
from typing import Dict, List, Optional

import mxnet as mx
from mxnet.gluon import Trainer

from ..clipping import global_norm

__all__ = ["Gauges"]

# The norm of 100 MB of gradients is 60 ms of a core, too much for each point of a fast network.
_NORM_EVERY = 5
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Gauges:
    """Learning rate, gradient norm, counters and memory, and times between two looks.

    Parameters
    ----------
    trainer : Trainer, optional
        An `ElasticTrainer` has counters; without a trainer there is memory only.
    """

    def __init__(self, trainer: Optional[Trainer]) -> None:
        self._trainer = trainer
        self._before = self._seconds()
        self._looks = 0

    def times(self, steps: int) -> Dict[str, float]:
        """Return seconds in collectives and center, a step, since the last call."""
        before, self._before = self._before, self._seconds()
        return {f"time/{name}_s": (s - before[name]) / steps for name, s in self._before.items()}

    def _seconds(self) -> Dict[str, float]:
        counters = self.counters()
        kinds = {"collectives": "collective_s", "center": "center_s"}
        return {name: counters[key] for name, key in kinds.items() if key in counters}

    def counters(self) -> Dict[str, float]:
        """Return the trainer's counters, where it has any."""
        counters = getattr(self._trainer, "counters", None)
        return {} if counters is None else counters.as_dict()

    def values(self) -> Dict[str, float]:
        """Return all else; waits for the gradients."""
        found = {**self._of_trainer(), "memory/host_mb": _resident_mb()}
        for gpu in self._gpus():
            free, total = mx.context.gpu_memory_info(gpu)
            found[f"memory/gpu{gpu}_mb"] = (total - free) / 1e6
        return found

    def _gpus(self) -> List[int]:
        """Those that the parameters are on: asking for others would take memory there."""
        trainer = self._trainer
        contexts = trainer._params[0].list_ctx() if trainer is not None and trainer._params else []
        return [ctx.device_id for ctx in contexts if ctx.device_type == "gpu"]

    def _of_trainer(self) -> Dict[str, float]:
        trainer = self._trainer
        if trainer is None:
            return {}
        found = {"learning_rate": trainer.learning_rate, **self.counters()}
        accumulation = getattr(trainer, "_accumulation", None)
        is_partial = accumulation is not None and accumulation.samples > 0
        self._looks += 1
        if not is_partial and self._looks % _NORM_EVERY == 1:
            trainable = [param for param in trainer._params if param.grad_req != "null"]
            # Of the mean over samples, which is what the update takes.
            found["gradient_norm"] = global_norm(trainable) * trainer._optimizer.rescale_grad
        return found


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE / 1e6
