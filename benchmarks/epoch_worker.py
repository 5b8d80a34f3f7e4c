"""One worker of `epoch.py`: trains on noise, and writes how long steps took and what was sent.

    epoch_worker.py TASK

TASK is JSON (see `epoch.py`). Under ``gluon-esgd run`` the trainer is `ElasticTrainer`; else it is
``gluon.Trainer`` with MXNet's own distributed store, and in servers and scheduler (DMLC_ROLE) the
import of MXNet is all that happens.
"""

import copy
import json
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import mxnet as mx
from cluster import counters
from mxnet import autograd, gluon

LAYERS, CLASSES = 4, 10
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def width(megabytes: float) -> int:
    """Return how wide the layers are for parameters of this size in all, float32."""
    return max(8, round(math.sqrt(megabytes * 1e6 / 4 / LAYERS)))


def network(megabytes: float) -> gluon.HybridBlock:
    """Return a perceptron: many parameters, little to compute."""
    net, wide = gluon.nn.HybridSequential(), width(megabytes)
    for _ in range(LAYERS):
        net.add(gluon.nn.Dense(wide, activation="relu", in_units=wide))
    net.add(gluon.nn.Dense(CLASSES, in_units=wide))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    return net


class Usage:
    """Bytes over this host's link and seconds of its processes' work, from here on."""

    def __init__(self) -> None:
        self._time, self._link, self._cpu = time.perf_counter(), _link(), _cpu()

    def so_far(self) -> Dict[str, Any]:
        """Return what came to it since."""
        link, cpu = _link(), {"workers": 0.0, "servers": 0.0, "agents": 0.0}
        for pid, (kind, seconds) in _cpu().items():
            cpu[kind] += seconds - self._cpu.get(pid, (kind, 0.0))[1]
        return {
            "seconds": time.perf_counter() - self._time,
            "link": {way: link[way] - self._link[way] for way in link},
            "cpu_s": {kind: round(seconds, 2) for kind, seconds in cpu.items()},
        }


def _link() -> Dict[str, int]:
    return counters("self", "e0") if os.path.exists("/sys/class/net/e0") else {"in": 0, "out": 0}


def _cpu() -> Dict[str, Tuple[str, float]]:
    """What the processes of this host are, and how many seconds they have worked."""
    found: Dict[str, Tuple[str, float]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            kind = _kind(pid)
            numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if kind:
            found[pid] = kind, TICK_S * (int(numbers[11]) + int(numbers[12]))
    return found


def _kind(pid: str) -> Optional[str]:
    """Servers are also what a station has forked, whose output is a log of their own."""
    argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    if b"gluon_esgd.center.zygote" in argv or b"gluon_esgd.center.station" in argv:
        log = os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
        return "servers" if log.startswith(("server", "scheduler")) else "agents"
    if not any(word.endswith(b"epoch_worker.py") for word in argv) or b"-m" in argv:
        return None
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return "servers" if {b"DMLC_ROLE=server", b"DMLC_ROLE=scheduler"} & set(environ) else "workers"


def make_trainer(task: Dict[str, Any], net: gluon.HybridBlock) -> Any:
    """Return the trainer, and this worker's number."""
    options = {"learning_rate": 1e-4, "momentum": 0.9}
    if task["stock"]:
        trainer = gluon.Trainer(net.collect_params(), "sgd", options, kvstore=task["store"])
        return trainer, int(task["number"])
    from gluon_esgd import ElasticTrainer, world

    return ElasticTrainer(net.collect_params(), "sgd", options), world().worker_rank


def has_time_left(seconds: float) -> bool:
    """Whether there are any, by the clock of the client's leader; collective in the client."""
    from gluon_esgd import broadcast_object

    return broadcast_object(seconds > 0)


def main() -> None:
    """Train for the steps of the task."""
    task = json.loads(sys.argv[1])
    net = network(task["megabytes"])
    trainer, number = make_trainer(task, net)
    data = mx.nd.random.normal(shape=(task["batch"], width(task["megabytes"])))

    def step() -> None:
        with autograd.record():
            loss = net(data).mean(axis=1)
        loss.backward()
        trainer.step(task["batch"])
        mx.nd.waitall()

    for _ in range(task["warm_up"]):
        step()
    before = None if task["stock"] else copy.copy(trainer.counters)
    usage, times, more = Usage(), [], True
    while more:
        for _ in range(task["steps"]):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        more = task["seconds"] > 0 and has_time_left(task["seconds"] - sum(times))
    found = {"host": socket.gethostname(), **usage.so_far(), "step_s": times}
    if before is not None:
        found["exchanges"] = trainer.counters.exchanges - before.exchanges
        found["late"] = trainer.counters.exchanges_late - before.exchanges_late
    Path(task["folder"], f"worker{number}.json").write_text(json.dumps(found))
    if not task["stock"]:
        trainer.finish()


if __name__ == "__main__":
    main()
