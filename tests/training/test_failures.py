"""What goes wrong on one rank is said on all of them, the job ends, and nothing hangs."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any, Callable, List

import mxnet as mx
import pytest
from mxnet import gluon

from gluon_esgd.launch.proc import clean_shared_memory

from ..pool import OPEN_MPI_PYTHON, Pools, Shape, environment, mpiexec, run_once
from .problems import batches, network, train_step

PURE = pytest.mark.mpi
LIMITS = (("GLUON_ESGD_STALL_WARNING_S", "0.5"), ("GLUON_ESGD_STALL_ABORT_S", "2"))


def _rank() -> int:
    from gluon_esgd import world

    return world().worker_rank


def _train(steps: int, before: Callable[[int, Any], None], **kwargs: Any) -> None:
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
        print(f"\nworker {_rank()} raised {type(error).__name__}: {error}\n", flush=True)
        time.sleep(1)  # let the others say theirs before this exit ends them
        sys.exit(5)


def _raised(output: str) -> List[str]:
    # The launcher shows the end of a failed rank's log once more.
    return sorted(set(re.findall(r"worker (\d) raised", output)))


def packing_fails() -> None:
    from gluon_esgd import gradients

    def pack(self: Any) -> None:
        if _rank() == 1 and self.step == 3:
            raise MemoryError("no room for the bucket")
        original(self)

    original, gradients._Reduction.pack = gradients._Reduction.pack, pack
    _train(10, lambda i, trainer: mx.nd.waitall())


@PURE
def test_an_error_in_the_engine_comes_out_of_the_next_step_on_all_ranks() -> None:
    ended = run_once(Shape(3), packing_fails)
    assert ended.code != 0
    assert _raised(ended.output) == ["0", "1", "2"]
    bucket = r"CollectiveError: gradient bucket 0 \(\w+_weight, \w+_bias, \w+_weight and 1 more\)"
    cause = r", step 3, seen by rank \d: rank 1: packing failed: MemoryError\('no room"
    assert len(re.findall(bucket + cause, ended.output)) == 3


def one_rank_has_stale_gradients() -> None:
    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x, y = batches()
    try:
        train_step(net, trainer, x[0], y[0])
        if _rank() == 1:
            trainer.step(4)  # without a backward pass
        for i in range(3):
            train_step(net, trainer, x[i], y[i])
            mx.nd.waitall()
    except (RuntimeError, UserWarning) as error:
        print(f"\nworker {_rank()} raised {type(error).__name__}: {error}\n", flush=True)
        time.sleep(1)
        sys.exit(5)


@PURE
def test_a_stale_gradient_on_one_rank_is_said_on_the_others() -> None:
    ended = run_once(Shape(2), one_rank_has_stale_gradients)
    assert ended.code != 0
    assert re.search(r"worker 1 raised UserWarning: Gradient of Parameter", ended.output)
    assert re.search(
        r"worker 0 raised CollectiveError: .*rank 1: gradient of \w+ was not updated by backward",
        ended.output,
    )


def user_code_fails() -> None:
    def before(i: int, _: Any) -> None:
        if i == 3 and _rank() == 1:
            raise KeyError("a fault of the script")

    _train(1000, before)


@PURE
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exception_on_one_rank_ends_the_job(ranks: int) -> None:
    ended = run_once(Shape(ranks), user_code_fails, timeout=30)
    assert ended.code != 0
    assert "KeyError: 'a fault of the script'" in ended.output


def one_rank_sleeps() -> None:
    _train(6, lambda i, _: time.sleep(60 if (i, _rank()) == (3, 1) else 0))


@PURE
def test_a_stall_is_reported_and_ends_within_its_limit() -> None:
    ended = run_once(Shape(2, settings=LIMITS), one_rank_sleeps, timeout=30)
    assert ended.code != 0
    missing = r"rank 0 of 2 waits in .*; on this node rank\(s\) \[1\] have not come to it"
    assert re.search(missing + r"; waited \d+ s so far", ended.output)
    assert re.search(
        r"StallError: rank 0 of 2 waits in gradient bucket 0 .*, step 4;", ended.output
    )


def one_rank_has_fewer_batches() -> None:
    _train(5 if _rank() == 1 else 50, lambda i, _: None)


@PURE
def test_a_rank_with_fewer_batches_is_named_at_once() -> None:
    ended = run_once(Shape(2), one_rank_has_fewer_batches, timeout=30)
    assert ended.code != 0
    assert re.search(
        r"worker 0 raised CollectiveError: the ranks are out of step: rank 0 is in gradient bucket "
        r"0 .*, step 6, rank 1 in ",
        ended.output,
    )


def killed() -> None:
    def before(i: int, _: Any) -> None:
        if i == 3 and _rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    _train(1000, before)


@PURE
def test_a_killed_rank_ends_the_job() -> None:
    ended = run_once(Shape(2), killed, timeout=30)
    assert ended.code != 0 and ended.seconds < 25


def agent_killed() -> None:
    from gluon_esgd.job import job

    def before(i: int, _: Any) -> None:
        link = job()._link
        if i == 5 and link is not None and job().world.client == 1:
            os.kill(link.agent_pid, signal.SIGKILL)

    _train(2000, before, interval=2)


@pytest.mark.servers
def test_a_lost_agent_is_an_error_on_all_ranks_of_its_client() -> None:
    ended = run_once(Shape(4, 2, 1, "esgd"), agent_killed, timeout=60)
    assert ended.code != 0
    assert re.search(r"worker 2 raised CenterError: .*agent", ended.output)
    assert re.search(r"worker 3 raised CenterError: .*agent", ended.output)


def clients_differ() -> None:
    from gluon_esgd import ElasticTrainer, world

    net = network(hidden=16 + world().client)
    trainer = ElasticTrainer(net.collect_params(), "sgd")
    x, y = batches()
    try:
        train_step(net, trainer, x[0], y[0])
    except RuntimeError as error:
        print(f"\nworker {_rank()} raised {type(error).__name__}: {error}\n", flush=True)
        time.sleep(2)
        sys.exit(5)


@pytest.mark.servers
@pytest.mark.parametrize("rule", ["esgd", "sgd"])
def test_clients_with_other_networks_are_told(rule: str) -> None:
    ended = run_once(Shape(2, 2, 1, rule), clients_differ, timeout=60)
    assert ended.code != 0
    assert re.search(r"CenterError: .*shapes \(digest\): client 0 has \d+, ", ended.output)


def _params(kind: str) -> Any:
    """Parameters that rank 1 makes otherwise than the others."""
    other = _rank() == 1
    shape, dtype = (4, 3), "float32"
    names = ["a", "b", "c"]
    if other and kind == "name":
        names[1] = "x"
    if other and kind == "shape":
        shape = (4, 5)
    if other and kind == "dtype":
        dtype = "float64"
    if other and kind == "order":
        names = ["a", "c", "b"]
    if other and kind == "number":
        names = names[:2]
    made = [gluon.Parameter(n, shape=shape, dtype=dtype) for n in names]
    for param in made:
        param.initialize()
    return made


def _differ(kind: str) -> str:
    from gluon_esgd import ElasticTrainer

    try:
        ElasticTrainer(_params(kind), "sgd")
    except ValueError as error:
        return str(error)
    return "no error"


def _same_in(kind: str) -> bool:
    return _differ(kind) == "no error"


DIFFERENCES = {
    "name": "parameter 1 differs: rank 0 has b (4, 3) float32 write initialized, rank 1 has x",
    "shape": "parameter 0 differs: rank 0 has a (4, 3) float32 write initialized, rank 1 has a (4, 5)",  # noqa: E501
    "dtype": "parameter 0 differs: rank 0 has a (4, 3) float32 write initialized, rank 1 has a (4, 3) float64",  # noqa: E501
    "order": "parameter 1 differs: rank 0 has b (4, 3) float32 write initialized, rank 1 has c",
    "number": "rank 0 has 3 parameters, rank 1 has 2",
}


@PURE
@pytest.mark.parametrize("shape", [Shape(3)], ids=lambda s: s.workers)
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_parameters_that_differ_are_named_on_all_ranks(
    pools: Pools, shape: Shape, kind: str
) -> None:
    for said in pools.get(shape).run(_differ, kind):
        assert said.startswith(DIFFERENCES[kind]), said
    assert all(pools.get(shape).run(_same_in, "none"))


def deferred_shapes_differ() -> None:
    from gluon_esgd import ElasticTrainer

    net = gluon.nn.Dense(3)
    net.initialize()
    ElasticTrainer(net.collect_params(), "sgd")
    try:
        net(mx.nd.ones((2, 5 + _rank())))
    except ValueError as error:
        print(f"\nworker {_rank()} raised {error}\n", flush=True)
        time.sleep(1)
        sys.exit(5)


@PURE
def test_deferred_shapes_that_differ_are_named() -> None:
    ended = run_once(Shape(2), deferred_shapes_differ, timeout=30)
    assert ended.code != 0
    assert _raised(ended.output) == ["0", "1"]
    assert "dense0_weight (3, 5) float32, rank 1 has dense0_weight (3, 6)" in ended.output


def _crossed(python: str, starter: str) -> str:
    call = "import gluon_esgd; gluon_esgd.world()"
    since = time.time()
    done = subprocess.run(
        [*mpiexec(starter), "-n", "2", python, "-c", call],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        text=True,
    )
    clean_shared_memory(since)
    assert done.returncode != 0
    return done.stdout


@PURE
def test_mpiexec_of_another_vendor_is_an_error_on_all_ranks() -> None:
    here, there = sys.executable, OPEN_MPI_PYTHON
    assert _crossed(here, there).count("probably of another vendor") == 2
    assert _crossed(there, here).count("probably of another vendor") == 2


def test_announced_ranks_without_mpiexec_are_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import gluon_esgd; gluon_esgd.world()"],
        env=environment(GLUON_ESGD_CLIENT_SIZE="4"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "started as one of 4 ranks, but MPI sees 1" in done.stderr


def ends_without_finish() -> None:
    from gluon_esgd import ElasticTrainer

    net = network()
    made: List[Any] = []
    atexit.register(lambda: print(f"worker {_rank()} made {made[0].counters.exchanges}"))
    made.append(ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))
    x, y = batches()
    for i in range(3):
        train_step(net, made[0], x[i], y[i])
    if _rank() == 1:
        time.sleep(0.5)  # ranks need not end at the same moment


@pytest.mark.servers
def test_a_clean_end_makes_the_last_exchange() -> None:
    ended = run_once(Shape(4, 2, 1, "esgd"), ends_without_finish)
    assert ended.code == 0, ended.output
    assert sorted(re.findall(r"worker (\d) made (\d)", ended.output)) == [
        (str(worker), "1") for worker in range(4)
    ]


def last_step_fails(waits: str) -> None:
    from gluon_esgd import ElasticTrainer, gradients

    def pack(self: Any) -> None:
        if _rank() == 1 and self.step == 3:
            raise MemoryError("no room for the bucket")
        original(self)

    original, gradients._Reduction.pack = gradients._Reduction.pack, pack
    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x, y = batches()
    for i in range(3):
        train_step(net, trainer, x[i], y[i])
    if waits == "waits":
        mx.nd.waitall()


@PURE
@pytest.mark.parametrize("waits", ["waits", "ends"])
def test_a_failure_that_no_step_meets_is_no_good_end(waits: str) -> None:
    ended = run_once(Shape(2), last_step_fails, waits)
    assert ended.code != 0
    assert "no room for the bucket" in ended.output


@pytest.mark.servers
def test_the_launcher_names_the_rank_whose_script_failed() -> None:
    ended = run_once(Shape(4, 2, 1, "esgd"), user_code_fails)
    assert ended.code != 0
    last = ended.output[ended.output.rindex("gluon-esgd: ") :]
    assert re.search(r"client 0 rank 1 \(pid \d+", last), last
    assert re.search(r"log: \S+client0\.rank1\.log", last), last


def one_client_fails() -> None:
    from gluon_esgd import gradients

    def pack(self: Any) -> None:
        if _rank() == 0 and self.step == 3:
            raise MemoryError("no room for the bucket")
        original(self)

    original, gradients._Reduction.pack = gradients._Reduction.pack, pack
    _train(20, lambda i, trainer: mx.nd.waitall())


@pytest.mark.servers
def test_under_sgd_the_other_clients_learn_of_an_error_at_once() -> None:
    ended = run_once(Shape(2, 2, 1, "sgd"), one_client_fails)
    assert ended.code != 0 and ended.seconds < 40
    assert re.search(r"worker 0 raised CollectiveError: .*no room for the bucket", ended.output)
    assert re.search(
        r"worker 1 raised CollectiveError: .*a rank of another client has the cause", ended.output
    )


def settings_differ(name: str) -> None:
    from gluon_esgd import ElasticTrainer

    value = {"interval": 2 + _rank(), "lazy": _rank(), "alpha": 0.1 + 0.1 * _rank()}[name]
    try:
        ElasticTrainer(network().collect_params(), "sgd", rule="esgd", **{name: value})
    except ValueError as error:
        print(f"\nworker {_rank()} raised {error}\n", flush=True)
        time.sleep(1)
        sys.exit(5)


@pytest.mark.servers
@pytest.mark.parametrize("name", ["interval", "lazy"])
def test_settings_that_differ_over_ranks_are_named(name: str) -> None:
    ended = run_once(Shape(2, 1, 1, "esgd"), settings_differ, name)
    assert ended.code != 0 and _raised(ended.output) == ["0", "1"]
    assert re.search(
        rf"setting \d differs: rank 0 has {name} \d, rank 1 has {name} \d", ended.output
    )


def one_rank_asks_for_its_world() -> None:
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        time.sleep(60)
    from gluon_esgd import world

    world()


@PURE
def test_a_first_call_that_a_rank_does_not_make_is_bounded() -> None:
    limits = (("GLUON_ESGD_START_TIMEOUT_S", "2"),)
    ended = run_once(Shape(2, settings=limits), one_rank_asks_for_its_world, timeout=40)
    assert ended.code != 0
    assert re.search(r"Timeout \(0:00:02\).*in _with_all_ranks_that", ended.output, re.DOTALL)


def step_does_not_wait(rule: str, interval: str, lazy: str) -> None:
    from gluon_esgd import ElasticTrainer, gradients

    def pack(self: Any) -> None:
        time.sleep(0.2)
        original(self)

    original, gradients._Reduction.pack = gradients._Reduction.pack, pack
    net = network()
    trainer = ElasticTrainer(
        net.collect_params(), "sgd", rule=rule, interval=int(interval), lazy=int(lazy)
    )
    x, y = batches()
    train_step(net, trainer, x[0], y[0])
    before = trainer.counters.step_wait_s
    for i in range(8):
        train_step(net, trainer, x[i], y[i])
    print(f"\nworker {_rank()} waited {trainer.counters.step_wait_s - before:.3f} s\n", flush=True)
    trainer.finish()


@pytest.mark.servers
@pytest.mark.parametrize(
    ("rule", "interval", "lazy"), [("asgd", "1", "1"), ("esgd", "3", "3"), ("esgd", "2", "0")]
)
def test_a_step_does_not_wait_for_its_communication(rule: str, interval: str, lazy: str) -> None:
    ended = run_once(Shape(4, 2, 1, rule), step_does_not_wait, rule, interval, lazy)
    assert ended.code == 0, ended.output
    waited = re.findall(r"worker \d waited ([\d.]+) s", ended.output)
    # Eight collectives of 0.2 s each were in the way: a step that waits for one takes that long.
    assert len(waited) == 4 and max(map(float, waited)) < 0.8, waited


def one_rank_makes_one_more_step() -> None:
    _train(6 if _rank() == 0 else 5, lambda i, _: None)


@PURE
def test_one_more_step_on_one_rank_is_named_at_the_end() -> None:
    ended = run_once(Shape(2), one_rank_makes_one_more_step, timeout=30)
    assert ended.code != 0
    assert re.search(r"out of step: rank 0 is in .*, step 6, rank 1 in ", ended.output)


def center_on_one_rank() -> None:
    from gluon_esgd import ElasticTrainer

    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=6), gluon.nn.BatchNorm(in_channels=4))
    net.initialize()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x, y = batches()
    for i in range(3):
        train_step(net, trainer, x[i], y[i])
    if _rank() == 0:
        with trainer.center():
            print("the center was shown")


@PURE
def test_center_on_one_rank_only_is_an_error_and_no_result() -> None:
    ended = run_once(Shape(2), center_on_one_rank, timeout=30)
    assert ended.code != 0
    assert "out of step" in ended.output or "have left" in ended.output
    assert "the center was shown" not in ended.output


def crash() -> None:
    import ctypes

    def before(i: int, _: Any) -> None:
        if i == 4 and _rank() == 1:
            ctypes.string_at(0)

    _train(100, before, interval=1)


@pytest.mark.servers
def test_a_crash_with_operations_pending_ends_the_rank() -> None:
    ended = run_once(Shape(2, 2, 1, "esgd"), crash, timeout=60)
    assert ended.code == 128 + signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ended.output
    assert re.search(r"client 1 rank 0 .*SIGSEGV", ended.output)


def finalizes_mpi() -> None:
    from mpi4py import MPI

    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x, y = batches()
    train_step(net, trainer, x[0], y[0])
    mx.nd.waitall()
    MPI.Finalize()


@PURE
def test_mpi_finalized_before_the_end_is_said() -> None:
    ended = run_once(Shape(2), finalizes_mpi, timeout=30)
    assert ended.code != 0
    assert "call trainer.finish() before MPI.Finalize()" in ended.output
