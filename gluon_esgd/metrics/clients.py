"""Results of all clients for the main one: through the folder of the job, or among leaders."""

from __future__ import annotations

import json
import os
import time
from typing import Dict, List, Mapping, Optional

from ..durable import write_whole
from ..engine import lane
from ..topology import world

__all__ = ["share_with_main"]


def share_with_main(
    values: Mapping[str, float], timeout_s: float = 120.0
) -> List[Optional[Dict[str, float]]]:
    """Give the main client the `values` of all clients.

    Collective in the client; all clients call it equally often. Where they are MPI jobs of their
    own they have the job's folder between them: leaders write
    ``state/result{N}-client{K}.json``, client 0 waits for them. Where they are ranks of one MPI job
    the leaders gather, which is collective in the job.

    Returns
    -------
    list
        By client; None where nothing came within `timeout_s` (a client that failed, or
        machines that do not share the folder). Clients other than 0 get their own only.

    Raises
    ------
    CenterError
        On all ranks of a client whose leader could not write, or, in one MPI job, waited for the
        others past the limit of collectives.
    """
    me, job_dir = world(), world().settings.job_dir
    mine: List[Optional[Dict[str, float]]] = [None] * me.num_clients
    mine[me.client] = dict(values)
    if me.settings.is_split:
        everything = _gathered(dict(values))
        return everything if me.client == 0 else mine
    if job_dir is None or me.num_clients == 1:
        return mine
    number = me.broadcast(_calls_before(job_dir, me.client) if me.is_leader else None)
    paths = [_result(job_dir, number, k) for k in range(me.num_clients)]
    me.on_leader(lambda: _write(paths[me.client], dict(values)))
    if me.client != 0:
        return mine
    return me.broadcast(_collect(paths, timeout_s) if me.is_leader else None)


def _gathered(values: Dict[str, float]) -> List[Optional[Dict[str, float]]]:
    me, said = world(), []

    def gather() -> None:
        assert me.leaders is not None
        lane().wait()  # leaders exchange there too, by the same communicator
        said.extend(me.leaders.allgather(values, "share_with_main"))

    me.on_leader(gather)
    return me.broadcast(said)


def _result(job_dir: str, number: int, client: int) -> str:
    return os.path.join(job_dir, "state", f"result{number}-client{client}.json")


def _calls_before(job_dir: str, client: int) -> int:
    number = 0
    while os.path.exists(_result(job_dir, number, client)):
        number += 1
    return number


def _write(path: str, values: Dict[str, float]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, json.dumps(values).encode(), synced=False)  # client 0 waits for it


def _collect(paths: List[str], timeout_s: float) -> List[Optional[Dict[str, float]]]:
    """Read each of `paths` as it appears; None for those that are not there in time."""
    found: List[Optional[Dict[str, float]]] = [None] * len(paths)
    end = time.monotonic() + timeout_s
    while True:
        for k, path in enumerate(paths):
            if found[k] is None and os.path.exists(path):
                with open(path) as file:
                    found[k] = json.load(file)
        if None not in found or time.monotonic() > end:
            return found
        time.sleep(0.05)
