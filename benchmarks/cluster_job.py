"""Jobs on a `cluster.Cluster`: by ``gluon-esgd run``, and by MXNet's own parameter server."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence

from cluster import Cluster

__all__ = ["launch", "launch_stock"]

START_S, EXCHANGE_S = 600, 600  # limits: cores are few, and links slow
STOCK_PORT = 9100


def launch(
    cluster: Cluster,
    workers: int,
    flags: Mapping[str, Any],
    script: Path,
    task: Dict[str, Any],
    limit_s: float,
) -> None:
    """Run a job by ``gluon-esgd run`` until it ends.

    Parameters
    ----------
    cluster : Cluster
        Workers are spread evenly over its hosts; its server's host gets the servers.
    workers : int
        Ranks in all.
    flags : mapping
        Further flags of the launcher, by name; "--servers" among them.
    script : Path
        What each rank runs.
    task : dict
        What the script gets as its argument, in JSON; "folder" is where the job lives.
    limit_s : float
        Seconds for all of it.

    Raises
    ------
    SystemExit
        The job failed, or took longer; with the end of what it wrote.
    """
    slots = [workers // cluster.network.hosts] * cluster.network.hosts
    if flags["--servers"]:
        slots += [0] * (len(cluster.names) - len(slots))
    flags = {
        "-n": workers,
        "--hosts": ",".join(f"{a}:{s}" for a, s in zip(cluster.addresses, slots)),
        "--remote-shell": cluster.shell,
        "--job-dir": f"{task['folder']}/job",
        "--start-timeout": START_S,
        "--env": "OMP_NUM_THREADS=1",
        "--max-restarts": 0,  # what fails is no figure
        **flags,
    }
    limits = [f"GLUON_ESGD_CENTER_LIMIT_S={EXCHANGE_S}", f"GLUON_ESGD_START_TIMEOUT_S={START_S}"]
    run = [sys.executable, "-m", "gluon_esgd.launch"]
    run += [str(word) for flag in flags.items() for word in flag]
    command = ["env", *limits, *run, sys.executable, str(script), json.dumps(task)]
    with _output(task["folder"]) as streams:
        _wait([cluster.start(0, command, **streams)], task["folder"], limit_s)


def launch_stock(
    cluster: Cluster,
    workers: int,
    servers: int,
    script: Path,
    task: Dict[str, Any],
    limit_s: float,
) -> None:
    """Run a job by MXNet's own scheduler, servers and workers; as `launch` where it is the same.

    Servers are placed as the launcher places them, and workers kept to cores as by it. Each
    worker's task says its "number". With 0 servers there is no scheduler either.
    """
    addresses, per_host = cluster.addresses, workers // cluster.network.hosts
    places = range(len(addresses)) if len(addresses) == cluster.network.hosts else [-1]
    common = {
        "DMLC_PS_ROOT_URI": addresses[0],
        "DMLC_PS_ROOT_PORT": STOCK_PORT + time.monotonic_ns() // 1000 % 20000,
        "DMLC_NUM_SERVER": servers,
        "DMLC_NUM_WORKER": workers,
        "OMP_NUM_THREADS": 1,
    }
    roles = [("scheduler", 0, 0)] if servers else []
    roles += [("server", k, places[k % len(places)]) for k in range(servers)]
    roles += [("worker", k, k // per_host) for k in range(workers)]
    cores = sorted(os.sched_getaffinity(0))
    with _output(task["folder"]) as streams:
        jobs = []
        for role, k, host in roles:
            env = {**common, "DMLC_ROLE": role, "DMLC_NODE_HOST": addresses[host]}
            env = env if servers else {"OMP_NUM_THREADS": 1}
            core = str(cores[k % per_host % len(cores)])
            bind = ["taskset", "-c", core] if role == "worker" else []
            words = [f"{name}={value}" for name, value in env.items()]
            argv = [sys.executable, str(script), json.dumps({**task, "number": k})]
            jobs.append(cluster.start(host, ["env", *words, *bind, *argv], **streams))
        _wait(jobs, task["folder"], limit_s)


@contextlib.contextmanager
def _output(folder: str) -> Iterator[Dict[str, Any]]:
    with open(f"{folder}/output", "ab") as output:
        yield {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}


def _wait(jobs: "Sequence[subprocess.Popen[bytes]]", folder: str, limit_s: float) -> None:
    """Wait for all; the first that fails ends the wait, as others may wait for it for ever."""
    end, waiting = time.monotonic() + limit_s, list(jobs)
    while waiting:
        codes: List[Any] = [job.poll() for job in waiting]
        failed = [code for code in codes if code]
        if failed or time.monotonic() > end:
            why = f"exit code {failed[0]}" if failed else f"no end after {limit_s:g} s"
            text = Path(folder, "output").read_text(errors="replace")[-6000:]
            raise SystemExit(f"{why}:\n{text}")
        waiting = [job for job, code in zip(waiting, codes) if code is None]
        time.sleep(0.05)
