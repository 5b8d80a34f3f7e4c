"""What ranks of a failing job print, and how tests read it."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, List, Sequence

from .problems import batches, network, train_step

WORDS_S = 20.0  # for all to say what they met


def worker_rank() -> int:
    from gluon_esgd import world

    return world().worker_rank


@contextmanager
def telling(silent: Sequence[int] = ()) -> Iterator[None]:
    """Print the error that the block raises and end with code 5; the `silent` workers raise none.

    A rank that ends takes the others with it, so each waits until all have said theirs.
    """
    try:
        yield
    except (RuntimeError, UserWarning, ValueError) as error:
        print(f"\nworker {worker_rank()} raised {type(error).__name__}: {error}\n", flush=True)
        _wait_for_words(silent)
        sys.exit(5)


def _wait_for_words(silent: Sequence[int]) -> None:
    from gluon_esgd import world

    folder, workers = Path(os.environ["ONCE_FOLDER"]), set(range(world().num_workers))
    (folder / f"told{worker_rank()}").touch()
    end = time.monotonic() + WORDS_S
    while time.monotonic() < end:
        if all((folder / f"told{worker}").exists() for worker in workers.difference(silent)):
            return
        time.sleep(0.01)


def train_and_tell(
    steps: int, before: Callable[[int, Any], None], silent: Sequence[int] = (), **kwargs: Any
) -> None:
    """Train, calling `before` ahead of each step, and tell what ``step()`` raises."""
    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, **kwargs)
    x, y = batches()
    with telling(silent):
        for i in range(steps):
            before(i, trainer)
            train_step(net, trainer, x[i % 20], y[i % 20])
        trainer.finish()


def before_packing(action: Callable[[int], None]) -> None:
    """From now on call ``action(step)`` in the engine before each bucket is packed."""
    before_each_pack(lambda step, bucket: action(step))


def before_each_pack(action: Callable[[int, int], None]) -> Callable[[], None]:
    """Call ``action(step, bucket)`` in the engine before each is packed, until undone."""
    from gluon_esgd.gradients import _Reduction

    original = _Reduction.pack

    def pack(self: Any) -> None:
        action(self.step, self.bucket.number)
        original(self)

    def undo() -> None:
        _Reduction.pack = original  # type: ignore[method-assign]

    _Reduction.pack = pack  # type: ignore[method-assign]
    return undo


def fail_at_step_3(worker: int) -> None:
    """Let packing fail on one worker."""

    def fail(step: int) -> None:
        if worker_rank() == worker and step == 3:
            raise MemoryError("no room for the bucket")

    before_packing(fail)


def workers_that_raised(output: str) -> List[str]:
    # The launcher shows the end of a failed rank's log once more.
    return sorted(set(re.findall(r"worker (\d) raised", output)))
