"""One rank of `allreduce.py`, which starts it: every contestant in turn, round after round."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import allreduce_peers as peers
import numpy as np
from allreduce_own import Contestant, limits, on_devices, own, packing

from gluon_esgd import world
from gluon_esgd.settings import RANK_VARIABLES

# One timing takes at least as long: some ten times what a barrier leaves ranks apart.
_AT_LEAST_S = 2e-3


def bind() -> None:
    """Keep this rank on one core, ranks dealt out in turn; threads made later inherit it."""
    rank = next((int(os.environ[v]) for v in reversed(RANK_VARIABLES) if v in os.environ), 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


class Rounds:
    """Measure contestants side by side; all methods are collective.

    Parameters
    ----------
    count : int
        Turns that each has.
    finish : callable
        Waits for what GPUs have under way.
    """

    def __init__(self, count: int, finish: Callable[[], None]) -> None:
        self._count, self._finish = count, finish

    def rows(self, nbytes: int, contestants: List[Contestant]) -> List[Dict[str, Any]]:
        """Check and measure; one row for each, times from the first start to the last end.

        All ranks are on one machine, whose clock they share. Ranks that wait for a core while
        others work are so counted where they wait for nobody, too.
        """
        for contestant in contestants:
            self._check(nbytes, contestant)
        calls = [self._calibrate(contestant) for contestant in contestants]
        spans: List[List[Any]] = [[] for _ in contestants]
        for turn in range(self._count):
            for k in range(len(contestants)):
                which = (k + turn) % len(contestants)  # so that nobody always follows the same
                spans[which].append(self._turn(contestants[which], calls[which]))
        by_rank = np.array(world().allgather(spans))  # rank, contestant, round, start and end
        took_s = by_rank[..., 1].max(0) - by_rank[..., 0].min(0)
        return [
            {
                "bytes": nbytes,
                "contestant": contestant.name,
                "kind": contestant.kind,
                "took": contestant.took,
                "calls_per_timing": calls[k],
                "rounds_us": [round(t / calls[k] * 1e6, 3) for t in took_s[k]],
            }
            for k, contestant in enumerate(contestants)
        ]

    def _check(self, nbytes: int, contestant: Contestant) -> None:
        """Add up something known, end the job where it comes out wrong, leave zeros."""
        place, right = world(), True
        vectors = contestant.vectors
        each = [place.rank * len(vectors) + k + 1 for k in range(len(vectors))]
        total = sum(range(place.size * len(vectors) + 1))
        for vector, factor in zip(vectors, each):
            _fill(vector, factor)
        with contestant.turn():
            contestant.run()
            self._finish()
        for vector in vectors:
            right = right and _holds(vector, total)
            _fill(vector, 0)  # sums of zeros can be made for ever
        self._finish()
        wrong = [rank for rank, said in enumerate(place.allgather(right)) if not said]
        if wrong:
            raise SystemExit(f"{contestant.name}: wrong sum of {nbytes} bytes on rank(s) {wrong}")

    def _calibrate(self, contestant: Contestant) -> int:
        """How many calls one timing takes, the same on all ranks."""
        calls = 1
        while True:
            longest = max(
                end - start for start, end in world().allgather(self._turn(contestant, calls))
            )
            if longest >= _AT_LEAST_S:
                return calls
            calls = max(calls + 1, min(8 * calls, math.ceil(1.2 * calls * _AT_LEAST_S / longest)))

    def _turn(self, contestant: Contestant, calls: int) -> Tuple[float, float]:
        """When `calls` began and ended on this rank, in seconds, after one that does not count."""
        run = contestant.run
        with contestant.turn():
            run()
            self._finish()
            self._line_up()
            start = time.monotonic()
            for _ in range(calls):
                run()
            self._finish()
            return start, time.monotonic()

    def _line_up(self) -> None:
        """A barrier that leaves the core to late ranks, then one that all leave together."""
        world().barrier()
        if world().size > 1:
            from mpi4py import MPI

            MPI.COMM_WORLD.Barrier()


def _fill(vector: Any, factor: int) -> None:
    """Write 1, 2, 3, 4, 5, 1, ... times `factor`: sums of few ranks are exact in any type."""
    values = vector if isinstance(vector, np.ndarray) else np.empty(vector.shape, vector.dtype)
    for k in range(5):
        values[k::5] = (k + 1) * factor
    if values is not vector:
        vector.set(values)


def _holds(vector: Any, factor: int) -> bool:
    values = vector if isinstance(vector, np.ndarray) else vector.get()
    return all(bool((values[k::5] == (k + 1) * factor).all()) for k in range(5))


def in_host_memory(spec: Dict[str, Any], folder: Path) -> Dict[str, Any]:
    """Run all sizes with vectors in host memory."""
    place, rows = world(), []
    peers.start(spec["peers"], place.rank, place.size, folder)
    rounds = Rounds(spec["repeats"], lambda: None)
    for nbytes in spec["sizes"]:
        private = np.zeros(nbytes // np.dtype(spec["dtype"]).itemsize, spec["dtype"])
        mine = own(spec["algorithms"], private, place.comm)
        made = [*mine, *peers.peers(spec["peers"], private), *limits(private)]
        measured = rounds.rows(nbytes, made)
        for row, contestant in zip(measured, made):
            if contestant.name == "hierarchical":
                row["bytes_sent_by_node"] = sent_by_node(contestant)
        rows += measured
        say(f"{nbytes} bytes done")
    nbytes, contestant = packing()
    rows += rounds.rows(nbytes, [contestant])
    return {"rows": rows, "left_out": {}}


def sent_by_node(contestant: Contestant) -> List[int]:
    """Make it once more, and count what each node sends."""
    comm = world().comm
    before = comm.sent_bytes
    contestant.run()
    said = world().allgather([comm.node_rank, comm.sent_bytes - before])
    return [sum(n for node, n in said if node == k) for k in range(len(comm.nodes))]


def on_gpus(spec: Dict[str, Any]) -> Dict[str, Any]:
    """Run all sizes with vectors on GPUs, dealt out in turn."""
    import cupy

    place, count = world(), cupy.cuda.runtime.getDeviceCount()
    devices = [(place.rank * spec["vectors"] + k) % count for k in range(spec["vectors"])]

    def finish() -> None:
        for device in devices:
            cupy.cuda.Device(device).synchronize()

    rows: List[Dict[str, Any]] = []
    left_out: Dict[str, str] = {}
    rounds = Rounds(spec["repeats"], finish)
    for nbytes in spec["sizes"]:
        vectors = []
        for device in devices:
            with cupy.cuda.Device(device):
                vectors.append(
                    cupy.zeros(nbytes // np.dtype(spec["dtype"]).itemsize, spec["dtype"])
                )
        rows += rounds.rows(nbytes, on_devices(spec["algorithms"], vectors, place.comm, left_out))
        say(f"{nbytes} bytes done")
    return {"rows": rows, "left_out": left_out}


def say(text: str) -> None:
    """Tell how far the run is."""
    if world().is_leader:
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Do what `allreduce.py` has written into a folder, and write rows there."""
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    if spec["bind"] == "yes":
        bind()
    done = on_gpus(spec) if spec["memory"] == "device" else in_host_memory(spec, folder)
    if world().is_leader:
        (folder / "rows.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
