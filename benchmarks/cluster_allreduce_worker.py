"""One rank of `cluster_allreduce.py`: makes each collective in turn, and times it.

cluster_allreduce_worker.py TASK
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
from cluster import counters

from gluon_esgd import world
from gluon_esgd.collectives import plan, shared_array
from gluon_esgd.communicator import Communicator


def turn(comm: Communicator, collective: str, array: np.ndarray, run: Callable[[], None]) -> Any:
    """Make it once, from a barrier on; return seconds and bytes sent, the most of all ranks."""
    array[:] = 1.0 if collective == "allreduce" else comm.rank
    comm.barrier()
    sent, start = counters("self", "e0")["out"], time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    comm.barrier()
    sent = counters("self", "e0")["out"] - sent
    if not (array == (comm.size if collective == "allreduce" else 0)).all():
        raise SystemExit(f"{collective} came to a wrong result")
    found = comm.allgather([seconds, sent])
    return {"seconds": max(s for s, _ in found), "sent_bytes": max(b for _, b in found)}


def main() -> None:
    """Do all sizes and rounds; the first round does not count."""
    task, comm = json.loads(sys.argv[1]), world().comm
    rows: List[Dict[str, Any]] = []
    for megabytes in task["megabytes"]:
        array = shared_array(int(megabytes * 1e6 / 4), np.float32, comm)
        plans = {
            (collective, name): plan(collective, array, comm, algorithm=name)
            for collective, names in task["contestants"].items()
            for name in names
        }
        for number in range(task["rounds"] + 1):
            for (collective, name), run in plans.items():
                row = {"collective": collective, "algorithm": name, "megabytes": megabytes}
                row.update(turn(comm, collective, array, run))
                rows += [row] if number else []
    if comm.rank == 0:
        Path(task["folder"], "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
