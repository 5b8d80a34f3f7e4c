"""The measurement, on all ranks of a client: every algorithm, by size and collective, in turn."""

from __future__ import annotations

import shutil
import time
from typing import Callable, Dict, List, Sequence

import numpy as np

from ..collectives import names, plan, shared_array
from ..collectives.registry import COLLECTIVES
from ..collectives.tuning import serves
from ..communicator import Communicator
from .request import size_text

__all__ = ["Samples", "measure"]

# collective -> bytes -> algorithm -> microseconds, one for each round
Samples = Dict[str, Dict[int, Dict[str, List[float]]]]

_ROUNDS = 25
_SAMPLE_S = 1e-3  # short collectives are made several times between two looks at the clock
_MOST_REPETITIONS = 50
_SAY_EVERY_S = 3.0


def measure(
    comm: Communicator, sizes: Sequence[int], limit_s: float, say: Callable[[str], None]
) -> Samples:
    """Measure every algorithm for vectors of float32 in shared memory; collective.

    Parameters
    ----------
    comm : Communicator
    sizes : sequence of int
        Bytes of a vector. Where time or memory runs out, the largest are missing.
    limit_s : float
        When to stop; what has begun is made to its end.
    say : callable
        Gets a line on the progress.

    Returns
    -------
    dict
        For each collective, size and algorithm the times in microseconds until the last rank had
        it, by round; the same on all ranks.
    """
    end = time.monotonic() + limit_s
    fitting = _that_fit(sorted(set(sizes)), comm)
    cells = _cells(fitting, comm, end)
    largest = cells[-1].nbytes
    if largest < max(sizes):
        lacking = "time" if largest < fitting[-1] else "room in /dev/shm"
        say(f"not enough {lacking} for vectors above {size_text(largest)}")
    _rounds(cells, comm, end, say)
    return _of_the_last_rank(cells, comm)


class _Cell:
    """The algorithms of one collective for one vector."""

    def __init__(self, collective: str, vector: np.ndarray, comm: Communicator) -> None:
        self.collective, self.nbytes = collective, vector.nbytes
        plans = {
            name: plan(collective, vector, comm, algorithm=name) for name in _able(collective, comm)
        }
        # Without shared memory others stand in for some.
        self._plans = {name: made for name, made in plans.items() if made.algorithm == name}
        self._repetitions = dict.fromkeys(self._plans, 1)
        self._comm = comm
        self.samples: Dict[str, List[float]] = {name: [] for name in self._plans}
        self.seconds = 0.0
        for run in self._plans.values():
            run()
        self._measure(list(self._plans))
        firsts = comm.allgather([times[0] for times in self.samples.values()])
        for name, first in zip(self._plans, np.max(firsts, axis=0)):
            self._repetitions[name] = int(min(max(1, _SAMPLE_S / first), _MOST_REPETITIONS))

    def round(self, number: int) -> None:
        """Measure each once more; who comes first changes with `number`."""
        order = list(self._plans)
        first = number % len(order)
        self._measure(order[first:] + order[:first])

    def _measure(self, order: Sequence[str]) -> None:
        start = time.monotonic()
        for name in order:
            self.samples[name].append(self._sample(name))
        self.seconds = time.monotonic() - start

    def _sample(self, name: str) -> float:
        run, repetitions = self._plans[name], self._repetitions[name]
        run() if repetitions > 1 else self._comm.barrier()  # brings the ranks together
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        return (time.perf_counter() - start) / repetitions


def _cells(sizes: Sequence[int], comm: Communicator, end: float) -> List[_Cell]:
    """Make and measure all once, in the order of sizes, as far as time suffices."""
    vector = shared_array(sizes[-1] // 4, np.float32, comm)
    cells: List[_Cell] = []
    for nbytes in sizes:
        row = cells[-len(COLLECTIVES) :]
        # Each is run twice, and takes at most so many times as long as it is longer.
        expected_s = sum(2 * cell.seconds * nbytes / cell.nbytes for cell in row)
        if not _agreed(not row or time.monotonic() + expected_s < end, comm):
            break
        cells += [_Cell(collective, vector[: nbytes // 4], comm) for collective in COLLECTIVES]
    return cells


def _able(collective: str, comm: Communicator) -> List[str]:
    """The algorithms to compare; on one machine `hierarchical` is `shared`."""
    machines = len(comm.nodes)
    able = [name for name in names(collective) if serves(collective, name, machines)]
    return [name for name in able if machines > 1 or name != "hierarchical"]


def _that_fit(sizes: List[int], comm: Communicator) -> List[int]:
    """The sizes for which shared memory has room twice; all of them where there is none."""
    try:
        room = shutil.disk_usage("/dev/shm").free // (2 * comm.local_size)
    except OSError:
        room = 0
    least = min(comm.allgather(room))
    return [nbytes for nbytes in sizes if nbytes <= least] or sizes


def _agreed(mine: bool, comm: Communicator) -> bool:
    """What rank 0 thinks, since clocks differ."""
    return bool(comm.allgather(mine)[0])


def _rounds(
    cells: Sequence[_Cell], comm: Communicator, end: float, say: Callable[[str], None]
) -> None:
    said = time.monotonic()
    for number in range(1, _ROUNDS):
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            say(f"round {number} of {_ROUNDS}, {max(0.0, end - said):.0f} s left at most")
        for cell in cells:
            if not _agreed(time.monotonic() + cell.seconds < end, comm):
                return
            cell.round(number)


def _of_the_last_rank(cells: Sequence[_Cell], comm: Communicator) -> Samples:
    of_ranks = comm.allgather([list(cell.samples.values()) for cell in cells])
    out: Samples = {}
    for k, cell in enumerate(cells):
        slowest = [np.max(samples, axis=0) for samples in zip(*(mine[k] for mine in of_ranks))]
        by_name = {name: (1e6 * times).tolist() for name, times in zip(cell.samples, slowest)}
        out.setdefault(cell.collective, {})[cell.nbytes] = by_name
    return out
