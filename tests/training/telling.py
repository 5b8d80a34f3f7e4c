"""What ranks of a failing job print, and how tests read it."""

from __future__ import annotations

import re
import sys
import time
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List

from .problems import batches, network, train_step


def worker_rank() -> int:
    from gluon_esgd import world

    return world().worker_rank


@contextmanager
def telling() -> Iterator[None]:
    """Print the error that the block raises and end with code 5."""
    try:
        yield
    except (RuntimeError, UserWarning, ValueError) as error:
        print(f"\nworker {worker_rank()} raised {type(error).__name__}: {error}\n", flush=True)
        time.sleep(1)  # let the others say theirs before this exit ends them
        sys.exit(5)


def train_and_tell(steps: int, before: Callable[[int, Any], None], **kwargs: Any) -> None:
    """Train, calling `before` ahead of each step, and tell what ``step()`` raises."""
    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, **kwargs)
    x, y = batches()
    with telling():
        for i in range(steps):
            before(i, trainer)
            train_step(net, trainer, x[i % 20], y[i % 20])
        trainer.finish()


def before_packing(action: Callable[[int], None]) -> None:
    """From now on call ``action(step)`` in the engine before each bucket is packed."""
    from gluon_esgd.gradients import _Reduction

    original = _Reduction.pack

    def pack(self: Any) -> None:
        action(self.step)
        original(self)

    _Reduction.pack = pack  # type: ignore[method-assign]


def fail_at_step_3(worker: int) -> None:
    """Let packing fail on one worker."""

    def fail(step: int) -> None:
        if worker_rank() == worker and step == 3:
            raise MemoryError("no room for the bucket")

    before_packing(fail)


def workers_that_raised(output: str) -> List[str]:
    # The launcher shows the end of a failed rank's log once more.
    return sorted(set(re.findall(r"worker (\d) raised", output)))
