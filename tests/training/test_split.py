"""One MPI job whose ranks are several clients: no server is between them."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest

from ..pool import OPEN_MPI_PYTHON, Ended, Pools, Shape, label, run_once
from .problems import BATCH, batches, flat, network, shares, train_alone, train_shared, train_step
from .telling import telling, train_and_tell, worker_rank, workers_that_raised

pytestmark = pytest.mark.mpi

SPLIT = Shape(4, 2, 0, "esgd")
LIMITS = (("GLUON_ESGD_STALL_WARNING_S", "0.5"), ("GLUON_ESGD_STALL_ABORT_S", "3"))
SGD: Dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.9}


def declared(nodes: str, rule: str = "esgd") -> Shape:
    return Shape(4, 2, 0, rule, settings=(("GLUON_ESGD_NODES", nodes),))


def _places() -> List[Any]:
    from gluon_esgd import world

    w = world()
    leaders = w.leaders
    place = [w.client, w.rank, w.size, w.local_rank, w.local_size, w.node_rank, w.num_nodes]
    if leaders is None:
        return [place, None]
    assert leaders.allgather(w.client, "a test") == [0, 1]
    return [place, [leaders.rank, leaders.size, leaders.nodes]]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (
            SPLIT,
            [
                [[0, 0, 2, 0, 2, 0, 1], [0, 2, [[0, 1]]]],
                [[0, 1, 2, 1, 2, 0, 1], None],
                [[1, 0, 2, 0, 2, 0, 1], [1, 2, [[0, 1]]]],
                [[1, 1, 2, 1, 2, 0, 1], None],
            ],
        ),
        (
            declared("3,1"),  # client 1 lies on both
            [
                [[0, 0, 2, 0, 2, 0, 1], [0, 2, [[0, 1]]]],
                [[0, 1, 2, 1, 2, 0, 1], None],
                [[1, 0, 2, 0, 1, 0, 2], [1, 2, [[0, 1]]]],
                [[1, 1, 2, 0, 1, 1, 2], None],
            ],
        ),
        (
            declared("2,2"),  # leaders have no memory in common
            [
                [[0, 0, 2, 0, 2, 0, 1], [0, 2, [[0], [1]]]],
                [[0, 1, 2, 1, 2, 0, 1], None],
                [[1, 0, 2, 0, 2, 0, 1], [1, 2, [[0], [1]]]],
                [[1, 1, 2, 1, 2, 0, 1], None],
            ],
        ),
    ],
    ids=["one", "3,1", "2,2"],
)
def test_who_is_where_and_who_leads(pools: Pools, shape: Shape, expected: List[Any]) -> None:
    assert pools.get(shape).run(_places) == expected


@pytest.mark.parametrize("nodes", ["3,1", "2,2"])
def test_clients_on_several_machines_make_what_one_process_makes(pools: Pools, nodes: str) -> None:
    expected = train_alone("sgd", SGD)
    for weights, _ in pools.get(declared(nodes, "sgd")).run(train_shared, "sgd", SGD):
        np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=1e-6)


def _drawn_together(alpha: float) -> Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Clients that start apart and have no gradient: weights and center, before and after one."""
    from gluon_esgd import ElasticTrainer, world

    net = network()
    trainer = ElasticTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.0}, interval=1, lazy=0, alpha=alpha
    )
    x, y = batches()
    train_step(net, trainer, x[0], y[0])
    for param in net.collect_params().values():
        param.set_data(param.data() + (1 + world().client) ** 2)
    found = []
    for i in range(2):
        if i:
            train_step(net, trainer, x[i], y[i])
        found.append(flat(net))
        with trainer.center(sync=True):
            found.append(flat(net))
    assert trainer.counters.exchanges == 2 and trainer.counters.exchanges_late == 0
    if world().is_leader:
        assert trainer.counters.server_bytes == 3 * found[0].nbytes
    trainer.finish()
    x0, c0, x1, c1 = found
    return x0, c0, x1, c1


@pytest.mark.parametrize("shape", [SPLIT, Shape(3, 3, 0, "esgd")], ids=label)
def test_an_exchange_of_trainers_has_its_closed_form(pools: Pools, shape: Shape) -> None:
    p, alpha = shape.clients, 0.35
    results = pools.get(shape).run(_drawn_together, alpha)
    x0, c0, x1, c1 = (np.float64(part) for part in zip(*results[:: shape.workers // p]))
    close: Dict[str, Any] = {"rtol": 0, "atol": 1e-4}
    assert (c1 == c1[0]).all()
    np.testing.assert_allclose(x1.sum(0) + c1[0], x0.sum(0) + c0[0], **close)
    gap0, gap1 = x0.mean(0) - c0[0], x1.mean(0) - c1[0]
    np.testing.assert_allclose(gap1, (1 - alpha * (1 + p)) * gap0, **close)
    spread0, spread1 = x0 - x0.mean(0), x1 - x1.mean(0)
    np.testing.assert_allclose(spread1, (1 - alpha) * spread0, **close)


def _center_of_both() -> Tuple[bytes, bytes]:
    """What ``center()`` shows without asking the others, and with."""
    from gluon_esgd import ElasticTrainer, world

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", SGD, interval=3, lazy=1)
    mine = shares(BATCH, [1] * 4)[world().worker_rank]
    for x, y in zip(*batches(7)):
        train_step(net, trainer, x[mine], y[mine])
    with trainer.center():
        alone = flat(net).tobytes()
    with trainer.center(sync=True):
        together = flat(net).tobytes()
    trainer.finish()
    return alone, together


@pytest.mark.parametrize("shape", [SPLIT, declared("2,2")], ids=["one machine", "two"])
def test_every_client_holds_the_same_center(pools: Pools, shape: Shape) -> None:
    seen = pools.get(shape).run(_center_of_both)
    assert len({center for both in seen for center in both}) == 1


def trains(*rule: str) -> None:
    from gluon_esgd import ElasticTrainer

    ElasticTrainer(network().collect_params(), "sgd", SGD, rule=rule[0] if rule else None)


def told_apart() -> None:
    ranks = (os.environ.get(n) for n in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"))
    if "1" in ranks:
        del os.environ["GLUON_ESGD_NUM_CLIENTS"]
    trains()


NAME = "GLUON_ESGD_NUM_CLIENTS"


@pytest.mark.parametrize("python", [Shape(1).python, OPEN_MPI_PYTHON], ids=["mpich", "openmpi"])
def test_ranks_that_cannot_be_split_evenly_all_say_so(python: str) -> None:
    ended = run_once(Shape(3, 2, 0, "esgd", python=python), trains, timeout=90)
    assert ended.code != 0
    says = f"{NAME}=2 must divide the number of ranks, and mpirun has started 3: start with `mpirun"
    assert ended.output.count(f"TopologyError: {says} -n 2`, or a multiple") >= 1


def test_a_single_rank_cannot_be_split() -> None:
    ended = run_once(Shape(1, 4, 0, "esgd"), trains, timeout=90)
    assert ended.code != 0
    assert f"{NAME}=4 must divide the number of ranks, and mpirun has started 1" in ended.output


def test_ranks_that_were_told_different_numbers_hear_of_it() -> None:
    ended = run_once(Shape(2, 2, 0, "esgd"), told_apart, timeout=90)
    assert ended.code != 0
    assert f"{NAME} is 2 on rank 0 and 1 on rank 1: give all ranks the same" in ended.output


def test_a_declaration_of_machines_counts_all_ranks() -> None:
    ended = run_once(declared("1,1"), trains, timeout=90)
    assert ended.code != 0
    assert "GLUON_ESGD_NODES declares machines of 1, 1 ranks, 2 in all, but there are 4" in (
        ended.output
    )


def wants_asgd() -> None:
    with telling():
        trains("asgd")


def test_asgd_is_refused_on_all_ranks() -> None:
    ended = run_once(SPLIT, wants_asgd, timeout=90)
    assert ended.code != 0
    assert workers_that_raised(ended.output) == ["0", "1", "2", "3"]
    assert ended.output.count("ValueError: rule='asgd' is asynchronous, which needs a server") == 4


def intervals_differ() -> None:
    train_and_tell(3, lambda i, _: None, interval=4 + 2 * (worker_rank() // 2))


def test_clients_with_different_intervals_do_not_start() -> None:
    ended = run_once(SPLIT, intervals_differ, timeout=90)
    assert ended.code != 0
    assert workers_that_raised(ended.output) == ["0", "1", "2", "3"]
    says = r"the clients do not match: interval \(0: a function\): client 0 has 4, client 1 has 6"
    assert len(set(re.findall(r"client \d: " + says, ended.output))) == 2


def one_client_stands_still(slow: str) -> None:
    """A rank of client 1 sleeps before the step after the first exchange."""

    def before(i: int, _: Any) -> None:
        if i == 3 and worker_rank() == int(slow):
            time.sleep(60)

    train_and_tell(20, before, silent=(2, 3), interval=2, lazy=0)


def _at(pattern: str, ended: Ended) -> float:
    (found,) = re.findall(pattern, ended.output)
    return float(found)


def _named(ended: Ended, missing: str) -> bool:
    return bool(re.search(rf"client 0 of 2 waits in {missing}", ended.output))


@pytest.mark.parametrize("slow", ["2", "3"])
def test_a_client_that_stands_still_is_named_within_the_limit(slow: str) -> None:
    ended = run_once(
        Shape(4, 2, 0, "esgd", settings=LIMITS), one_client_stands_still, slow, timeout=90
    )
    assert ended.code != 0
    missing = r"exchange 2 of 'trainer0'; on this node client\(s\) \[1\] have not come to it"
    assert _named(ended, missing + r"; gave up after 3 s"), ended.output
    assert {"0", "1"} <= set(workers_that_raised(ended.output))


def test_on_another_machine_a_client_that_stands_still_ends_the_job_in_time() -> None:
    shape = declared("2,2")._replace(settings=(("GLUON_ESGD_NODES", "2,2"), *LIMITS))
    ended = run_once(shape, one_client_stands_still, "2", timeout=90)
    assert ended.code != 0
    assert _named(
        ended, r"exchange 2 of 'trainer0'; on other nodes client\(s\) \[1\] do not answer"
    )


def one_client_has_fewer_batches(steps: str, more: str) -> None:
    train_and_tell(int(steps) + int(more) * (worker_rank() < 2), lambda i, _: None, interval=4)


@pytest.mark.parametrize("more", ["30", "5"])
def test_a_client_with_fewer_batches_is_named_at_once(more: str) -> None:
    ended = run_once(SPLIT, one_client_has_fewer_batches, "10", more, timeout=90)
    assert ended.code != 0
    assert re.search(
        r"the clients are out of step: client 0 is in exchange 3 of 'trainer0', client 1 in the "
        "last exchange of 'trainer0'",
        ended.output,
    )


def test_equal_counts_end_well() -> None:
    ended = run_once(SPLIT, one_client_has_fewer_batches, "10", "0", timeout=90)
    assert ended.code == 0, ended.output


def one_client_leaves() -> None:
    from gluon_esgd import world

    def before(i: int, _: Any) -> None:
        if i == 3 and world().client == 1:
            world().leave()
            time.sleep(60)

    train_and_tell(20, before, silent=(2, 3), interval=2, lazy=0)


def test_a_client_that_has_left_is_not_waited_for() -> None:
    ended = run_once(SPLIT, one_client_leaves, timeout=90)
    assert ended.code != 0
    assert _named(ended, r"exchange 2 of 'trainer0', but client\(s\) \[1\] have left")


def killed(victim: str) -> None:
    def before(i: int, _: Any) -> None:
        if i == 3 and worker_rank() == int(victim):
            print(f"\nkilled at {time.monotonic()}\n", flush=True)
            time.sleep(0.5)  # let it be read
            os.kill(os.getpid(), signal.SIGKILL)

    train_and_tell(100000, before, interval=2)


@pytest.mark.parametrize("victim", ["1", "2"])
@pytest.mark.parametrize("python", [SPLIT.python, OPEN_MPI_PYTHON], ids=["mpich", "openmpi"])
def test_a_killed_rank_ends_all_clients(victim: str, python: str) -> None:
    ended = run_once(SPLIT._replace(python=python), killed, victim, timeout=90)
    took = time.monotonic() - _at(r"killed at ([\d.]+)", ended)
    assert ended.code != 0 and took < 15


def fails_alone() -> None:
    """Clients of one rank: an exception ends the others too."""

    def before(i: int, _: Any) -> None:
        if i == 3 and worker_rank() == 1:
            raise KeyError("a fault of the script")

    train_and_tell(100000, before, interval=2)


def test_an_exception_in_a_client_of_one_rank_ends_all() -> None:
    ended = run_once(Shape(2, 2, 0, "esgd"), fails_alone, timeout=90)
    assert ended.code != 0
    assert "KeyError: 'a fault of the script'" in ended.output
