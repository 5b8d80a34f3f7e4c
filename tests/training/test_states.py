"""A resumed run is the run that was not interrupted, on all ranks, in all algorithms."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
import pytest

from gluon_esgd import ElasticTrainer, world
from gluon_esgd.states import decode

from ..pool import Pools, Shape, label
from .problems import batches, flat, network, train_step
from .shapes import of_rules
from .states import (
    BACK,
    CASES,
    INTERVAL,
    SAVED,
    STEPS,
    has_center,
    load,
    make,
    momentum,
    resume,
    save,
    seen_center,
    train,
    uninterrupted,
)

ONE_CLIENT = [
    pytest.param(Shape(2), 1, marks=pytest.mark.mpi, id="mpi"),
    *(
        pytest.param(Shape(2, 1, 1, rule), lazy, marks=pytest.mark.servers, id=f"{rule}-{lazy}")
        for rule in ("esgd", "asgd")
        for lazy in (1, 3)
    ),
]


SPLIT = [  # clients that meet at fixed steps
    pytest.param(Shape(4, 2, 0, "esgd"), lazy, marks=pytest.mark.mpi, id=f"split-{lazy}")
    for lazy in (1, 3)
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("shape", "lazy"), [*ONE_CLIENT, *SPLIT])
def test_one_client_goes_on_to_the_bit(
    pools: Pools, shape: Shape, lazy: int, case: str, tmp_path: Path
) -> None:
    pool = pools.get(shape)
    whole = pool.run(uninterrupted, str(tmp_path), case, lazy)
    resumed = pool.run(resume, str(tmp_path), case, lazy)
    assert whole[0] == whole[1] and resumed == whole
    assert whole[0][2] != b""


@pytest.mark.servers
@pytest.mark.parametrize("shape", of_rules(2, 1, 1), ids=label)
def test_a_new_process_goes_on_to_the_bit(pools: Pools, shape: Shape, tmp_path: Path) -> None:
    whole = pools.get(shape).run(uninterrupted, str(tmp_path), "momentum", 3)
    other = shape._replace(settings=(("OMP_NUM_THREADS", "1"),))  # another pool
    assert pools.get(other).run(resume, str(tmp_path), "momentum", 3, True) == whole


def _two_clients(folder: str, case: str) -> Dict[str, Any]:
    """Save at step 5, go on in a new trainer, and compare with what was there."""
    net = network(seed=world().worker_rank)
    trainer = make(case, net, interval=INTERVAL)
    train(net, trainer, 0, SAVED)
    save(net, trainer, folder)
    own, remembered = flat(net), momentum(trainer)
    trainer.center(sync=True).__enter__()  # both have saved
    again = network(seed=8)
    resumed = make(case, again, 0.9, interval=INTERVAL)
    load(again, resumed, folder)
    center = seen_center(again, resumed)
    mailbox = resumed._replica._exchange._mailbox
    base = None if mailbox is None else mailbox.base
    kept = flat(again).tobytes() == own.tobytes() and momentum(resumed) == remembered
    train(again, resumed, SAVED, SAVED + 1)
    after = flat(again)
    train(again, resumed, SAVED + 1, SAVED + INTERVAL)
    load(again, resumed, folder)  # the same trainer, with an exchange in flight
    back = seen_center(again, resumed) == center and flat(again).tobytes() == own.tobytes()
    return {
        "kept": kept and back and momentum(resumed) == remembered,
        "own": own,
        "center": center,
        "after a step": after,
        "step": resumed._replica._step,
        "base": base,
    }


def _alone(folder: str, client: int) -> np.ndarray:
    """What the client's next step is in one process, with its file and the same samples."""
    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.9})
    net.load_parameters(os.path.join(folder, f"net{client}"))
    trainer.load_states(os.path.join(folder, "states" + (f".client{client}" if client else "")))
    x, y = batches()
    train_step(net, trainer, x[SAVED + 3 * client], y[SAVED + 3 * client])
    return flat(net)


@pytest.mark.servers
@pytest.mark.parametrize("shape", of_rules(4, 2, 1), ids=label)
def test_two_clients_go_on_each_with_its_own(pools: Pools, shape: Shape, tmp_path: Path) -> None:
    results = pools.get(shape).run(_two_clients, str(tmp_path), "momentum")
    positions = [
        decode((tmp_path / name).read_bytes(), name).position
        for name in ("states", "states.client1")
    ]
    center = positions[0].center.host
    for worker, result in enumerate(results):
        assert result["kept"] and result["step"] == SAVED
        # The order of the network is that of the trainer here.
        assert sorted(np.frombuffer(result["center"], "f")) == sorted(center)
        np.testing.assert_allclose(
            result["after a step"], _alone(str(tmp_path), worker // 2), rtol=1e-5, atol=1e-6
        )
    assert (results[0]["own"] != results[2]["own"]).any()
    if (
        shape.rule == "asgd"
    ):  # each counts on from the center that it took, not from the one there is
        for position, result in zip(positions, results[::2]):
            np.testing.assert_array_equal(result["base"], position.base.host)


def _rounds(folder: str, replaced: bool) -> Tuple[np.ndarray, np.ndarray, bytes]:
    net = network()
    trainer = make("momentum", net)
    train(net, trainer, 0, SAVED, whole_job=True)
    save(net, trainer, folder)
    train(net, trainer, SAVED, STEPS, whole_job=True)
    again = network(seed=8)
    resumed = make("momentum", again, 0.9)
    load(again, resumed, folder)
    if replaced and world().client == 1:
        for param in again.collect_params().values():
            param.set_data(param.data() * 0)  # client 0's weights hold
    train(again, resumed, SAVED, STEPS, whole_job=True)
    return flat(net), flat(again), momentum(resumed)


@pytest.mark.servers
def test_two_clients_under_sgd_stay_equal(pools: Pools, tmp_path: Path) -> None:
    results = pools.get(Shape(4, 2, 1, "sgd")).run(_rounds, str(tmp_path), False)
    for whole, resumed, remembered in results:
        np.testing.assert_allclose(resumed, whole, rtol=0, atol=1e-6)
        assert remembered == results[0][2]
    assert (tmp_path / "states.client1").exists()
    results = pools.get(Shape(4, 2, 1, "sgd")).run(_rounds, str(tmp_path), True)
    assert len({resumed.tobytes() for _, resumed, _ in results}) == 1


class _Said(logging.Handler):
    """What the library logs in a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> List[str]:
        logging.getLogger("gluon_esgd").addHandler(self)
        return self.lines

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("gluon_esgd").removeHandler(self)


def _new_client(folder: str) -> Tuple[List[str], bool, bool, bool]:
    """Client 1 has no file of its own."""
    net = network(seed=9)
    trainer = make("momentum", net, 0.9)
    with _Said() as said:
        load(net, trainer, folder, client=0)
    for param in net.collect_params().values():
        param.set_data(param.data() * 0.5)
    own = flat(net)
    center = seen_center(net, trainer)
    dropped = trainer._replica._drop_gradient
    took_center = flat(net).tobytes() == center
    return said, bool((flat(net) == own).all()), took_center, dropped


@pytest.mark.servers
@pytest.mark.parametrize("shape", of_rules(4, 2, 1), ids=label)
def test_a_client_without_a_file_takes_the_center(
    pools: Pools, shape: Shape, tmp_path: Path
) -> None:
    pools.get(Shape(2, 1, 1, shape.rule)).run(uninterrupted, str(tmp_path), "momentum", 1)
    results = pools.get(shape).run(_new_client, str(tmp_path))
    fname = tmp_path / "states"
    line = f"client 1 has no {fname}.client1: it takes {fname}, and the center like a new client"
    assert [said for said, _, _, _ in results] == [[], [], [line], []]
    assert [rest for _, *rest in results] == [[True, False, False]] * 2 + [[False, True, True]] * 2


def _back_and_again(folder: str, number: int) -> List[List[Tuple[bytes, bytes, bytes]]]:
    """Several trainers go back to step 5 with an exchange in flight, and on again."""

    lazy = {"lazy": INTERVAL} if has_center() else {}
    networks = [network(seed=i) for i in range(number)]
    trainers = [make("momentum", net, **lazy) for net in networks]
    pairs = list(zip(networks, trainers))
    for i, (net, trainer) in enumerate(pairs):
        os.makedirs(os.path.join(folder, str(i)), exist_ok=True)
        train(net, trainer, 0, SAVED, whole_job=True)
        save(net, trainer, os.path.join(folder, str(i)))
    seen = []
    for _ in range(2):
        for i in range(SAVED, STEPS + 1):
            for net, trainer in pairs:
                train(net, trainer, i, i + 1, whole_job=True)
        seen.append([(flat(n).tobytes(), momentum(t), b"") for n, t in pairs])
        for i, (net, trainer) in enumerate(pairs):
            load(net, trainer, os.path.join(folder, str(i)))
    back = [(flat(net).tobytes(), seen_center(net, trainer), b"") for net, trainer in pairs]
    seen.append(back)
    for trainer in trainers:
        trainer.finish()
    return seen


@pytest.mark.parametrize("shape", BACK)
def test_trainers_go_back_in_mid_run(pools: Pools, shape: Shape, tmp_path: Path) -> None:
    results = pools.get(shape).run(_back_and_again, str(tmp_path), 2, timeout=90)
    for worker, (once, again, back) in enumerate(results):
        leader = results[worker - worker % 2]
        assert once == again and (once, back) == (leader[0], leader[2])
    alike = shape.clients == 1 or shape.rule == "sgd"
    assert (results[0][0] == results[-1][0]) == alike


def _far_apart(folder: str) -> Tuple[float, float]:
    """The center is set exactly, however far the servers' was."""
    net = network()
    trainer = make("momentum", net)
    train(net, trainer, 0, 1)
    wrong = []
    for scale in (1e6, 1e-6, 3.0):
        for i, param in enumerate(net.collect_params().values()):
            random = np.random.RandomState(i).randn(*param.shape)
            param.set_data(mx.nd.array(random * scale))
        trainer.reset_center()
        own = flat(net)
        wrong.append(float((np.frombuffer(seen_center(net, trainer), "f") != own).sum()))
    trainer.finish()
    return max(wrong), float(flat(net).size)


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, 2, 1, "esgd")], ids=label)
def test_a_center_is_replaced_to_the_bit(pools: Pools, shape: Shape, tmp_path: Path) -> None:
    for wrong, _ in pools.get(shape).run(_far_apart, str(tmp_path)):
        assert wrong == 0
