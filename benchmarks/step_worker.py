"""One process of `step.py`: takes its core, trains on random data, writes what it measured.

    python step_worker.py TASK [INDEX]

TASK is JSON (see `step.py`); the index is the rank under an ``mpiexec``.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
WARM_UP, TRACED = 3, 5  # steps
PUSH_CALLS = 11

Task = Dict[str, Any]


def index() -> int:
    """Return the number of this process."""
    ranks = [os.environ[name] for name in RANK_VARIABLES if name in os.environ]
    return int(sys.argv[2] if len(sys.argv) > 2 else ranks[0])


def bind(number: int) -> None:
    """Keep to one core; before MXNet starts threads, which take over what holds then."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


class Meeting:
    """A folder in which the processes of one run, MPI or not, wait for each other."""

    def __init__(self, task: Task, number: int) -> None:
        self._folder, self._number = Path(task["folder"]), number
        self._processes = task["processes"]

    def announce(self, what: str) -> None:
        """Say that this process has come to `what`."""
        (self._folder / f"{what}.{self._number}").touch()

    def complete(self, what: str) -> bool:
        """Whether all processes have come to `what`."""
        return len(list(self._folder.glob(f"{what}.*"))) == self._processes

    def wait(self, what: str) -> None:
        """Wait for all processes."""
        self.announce(what)
        while not self.complete(what):
            time.sleep(0.005)


def memory() -> Dict[str, int]:
    """Return this process's resident memory in bytes, after libc gave back what is free.

    ``shmem`` counts shared pages on every rank that has touched them, ``pss_shmem`` gives each
    of those ranks its part, so that it may be added up.
    """
    ctypes.CDLL(None).malloc_trim(0)
    kinds = {"peak": "VmHWM", "anon": "RssAnon", "shmem": "RssShmem", "pss_shmem": "Pss_Shmem"}
    text = Path("/proc/self/status").read_text() + Path("/proc/self/smaps_rollup").read_text()
    lines = (line.split(":", 1) for line in text.splitlines() if line.endswith("kB"))
    found = {name: int(value.split()[0]) * 1024 for name, value in lines}
    return {kind: found[name] for kind, name in kinds.items()}


def network(model: str) -> Any:
    """Return the network, the same on all processes, not hybridized yet."""
    import mxnet as mx
    from mxnet.gluon import model_zoo, nn

    if model == "mlp":
        net = nn.HybridSequential()
        for _ in range(8):
            net.add(nn.Dense(64, activation="relu"))
        net.add(nn.Dense(10))
    else:
        small = {"thumbnail": True} if model.startswith("resnet") else {}
        net = model_zoo.vision.get_model(model, classes=10, **small)
    mx.random.seed(0)
    net.initialize(mx.init.Xavier())
    return net


def trainer_class(task: Task) -> Callable:
    """Return what makes the contestant's trainer; starts MPI where it needs it."""
    if task["kind"] == "gluon":
        from mxnet.gluon import Trainer

        return Trainer
    if task["kind"] == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
        return hvd.DistributedTrainer
    from gluon_esgd import ElasticTrainer, world

    if task["processes"] == 1:
        _force()
    world()
    return ElasticTrainer


def _force() -> None:
    """Send a lone rank through buckets and engine, which it has no need of and would skip."""
    from gluon_esgd.gradients import GradientReducer
    from gluon_esgd.topology import World

    World.is_distributed = property(lambda _: True)  # type: ignore[assignment,method-assign]
    GradientReducer.needed = property(lambda _: True)  # type: ignore[assignment,method-assign]


class Training:
    """A network, its trainer and a batch.

    The trainer is made before the first pass, as scripts do: gradients can move to shared memory
    as long as a hybridized network has not fixed where it writes them.
    """

    def __init__(self, task: Task) -> None:
        import mxnet as mx
        from mxnet import gluon

        make, self.before = trainer_class(task), memory()
        self.net = network(task["model"])
        self.net.hybridize(static_alloc=True, static_shape=True)
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self.size, pixels = task["batch_size"], task["image_size"]
        self.images = mx.nd.random.uniform(shape=(self.size, 3, pixels, pixels))
        self.labels = mx.nd.zeros((self.size,))
        options = {"learning_rate": 0.01, "momentum": 0.9}
        self.trainer = make(self.net.collect_params(), "sgd", options)

    def backward(self) -> None:
        """Push a forward and a backward pass."""
        from mxnet import autograd

        with autograd.record():
            loss = self.loss(self.net(self.images), self.labels)
        loss.backward()

    def step(self) -> float:
        """Return the seconds of one whole step."""
        from mxnet import nd

        start = time.perf_counter()
        self.backward()
        self.trainer.step(self.size)
        nd.waitall()
        return time.perf_counter() - start

    def gradients(self) -> List[int]:
        """Return the bytes of each gradient."""
        params = [p for p in self.net.collect_params().values() if p.grad_req != "null"]
        return [p.grad().size * 4 for p in params]


def train(task: Task, number: int) -> Dict[str, Any]:
    """Take the timed steps, and traced ones where asked."""
    training, meeting = Training(task), Meeting(task, number)
    for _ in range(WARM_UP):
        training.step()
    meeting.wait("warm")
    counters = getattr(training.trainer, "counters", None)
    earlier = counters.collective_s if counters else 0.0
    times = [training.step() for _ in range(task["steps"])]
    collective_s = counters.collective_s - earlier if counters else 0.0
    if task["trace"]:
        trace(training, task["trace"] if number == 0 else None)
    after = memory()
    meeting.announce("timed")
    while task["kind"] == "gluon" and not meeting.complete("timed"):
        training.step()  # whoever is measured still has the company it had before
    return {
        "step_s": median(times),
        "collective_s": collective_s / task["steps"],
        "gradient_bytes": sum(training.gradients()),
        "memory_before": training.before,
        "memory": after,
    }


def trace(training: Training, path: Any) -> None:
    """Take some steps under MXNet's profiler and write its trace to `path`, if there is one."""
    from mxnet import profiler

    if path is None:
        for _ in range(TRACED):
            training.step()
        return
    profiler.set_config(profile_symbolic=True, profile_imperative=True, filename=path)
    profiler.set_state("run")
    for number in range(TRACED):
        event = profiler.Event(f"step {number}")
        event.start()
        training.step()
        event.stop()
    profiler.set_state("stop")
    profiler.dump()


def push(task: Task, number: int) -> Dict[str, Any]:
    """Time how long the calls that push a step's collectives keep the main thread."""
    from mxnet import nd

    training = Training(task)
    training.step()

    def call(before: Callable[[], None]) -> float:
        nd.waitall()
        before()
        start = time.perf_counter()
        training.trainer._replica.reduce(training.size, False)  # what step() does before the update
        return time.perf_counter() - start

    def calls(before: Callable[[], None]) -> List[float]:
        return [call(before) for _ in range(WARM_UP + PUSH_CALLS)][WARM_UP:]

    def without_backward() -> None:
        for param in training.trainer._params:
            for data in param.list_data() if param.grad_req != "null" else ():
                data._fresh_grad = True  # else step() would say that backward is missing

    idle, behind = calls(without_backward), calls(training.backward)
    nd.waitall()
    sizes = training.gradients()
    return {"idle_s": idle, "behind_backward_s": behind, "parameters": len(sizes)}


def main() -> None:
    """Do what the task says."""
    task, number = json.loads(sys.argv[1]), index()
    bind(number)
    result = {"train": train, "push": push}[task["do"]](task, number)
    Path(task["folder"], f"result.{number}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
