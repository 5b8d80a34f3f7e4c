"""What ranks of a failing job print, and how tests read it."""

from __future__ import annotations

import re
import sys
import time
from typing import Any, Callable, List

from .problems import batches, network, train_step


def worker_rank() -> int:
    from gluon_esgd import world

    return world().worker_rank


def train_and_tell(steps: int, before: Callable[[int, Any], None], **kwargs: Any) -> None:
    """Train; print the error that ``step()`` raises and end with code 5."""
    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, **kwargs)
    x, y = batches()
    try:
        for i in range(steps):
            before(i, trainer)
            train_step(net, trainer, x[i % 20], y[i % 20])
        trainer.finish()
    except (RuntimeError, UserWarning) as error:
        print(f"\nworker {worker_rank()} raised {type(error).__name__}: {error}\n", flush=True)
        time.sleep(1)  # let the others say theirs before this exit ends them
        sys.exit(5)


def workers_that_raised(output: str) -> List[str]:
    # The launcher shows the end of a failed rank's log once more.
    return sorted(set(re.findall(r"worker (\d) raised", output)))
