"""A resumed run is the run that was not interrupted, on all ranks, in all algorithms."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from ..pool import Pools, Shape
from .problems import BATCH, batches, digest, flat, network, shares, train_step
from .test_gluon_states import OwnSchedule, parameters, step, values

SAVED, STEPS = 5, 12
INTERVAL = 4


def _scheduled() -> Dict[str, Any]:
    return {"momentum": 0.9, "lr_scheduler": mx.lr_scheduler.FactorScheduler(3, 0.7, base_lr=0.1)}


CASES: Dict[str, Tuple[str, Callable[[], Dict[str, Any]]]] = {
    "momentum": ("sgd", lambda: {"momentum": 0.9, "wd": 1e-3}),
    "adam": ("adam", dict),
    "nadam": ("nadam", dict),
    "schedule": ("sgd", _scheduled),
}


def has_center() -> bool:
    from gluon_esgd import world

    return world().settings.num_servers > 0 or world().num_clients > 1


def make(case: str, net: Any, rate: float = 0.1, **kwargs: Any) -> Any:
    from gluon_esgd import ElasticTrainer

    name, settings = CASES[case]
    if has_center():
        kwargs.setdefault("interval", INTERVAL)
    else:
        kwargs.pop("lazy", None)
    return ElasticTrainer(
        net.collect_params(), name, dict(learning_rate=rate, **settings()), **kwargs
    )


def train(net: Any, trainer: Any, start: int, stop: int, whole_job: bool = False) -> None:
    """Steps ``[start, stop)``; a client's ranks share each batch, or all ranks of the job do."""
    from gluon_esgd import world

    place = world()
    if whole_job:
        mine = shares(BATCH, [1] * place.num_workers)[place.worker_rank]
    else:
        mine = shares(BATCH, [1] * place.size)[place.rank]
    x, y = batches()
    shift = 0 if whole_job else 3 * place.client
    for i in range(start + shift, stop + shift):
        train_step(net, trainer, x[i][mine], y[i][mine])


def save(net: Any, trainer: Any, folder: str) -> None:
    """The states, and each client's own weights beside them."""
    from gluon_esgd import world

    trainer.save_states(os.path.join(folder, "states"))
    if world().is_leader:
        net.save_parameters(os.path.join(folder, f"net{world().client}"))
    world().barrier()


def load(net: Any, trainer: Any, folder: str, client: Optional[int] = None) -> None:
    from gluon_esgd import world

    net.load_parameters(os.path.join(folder, f"net{world().client if client is None else client}"))
    trainer.load_states(os.path.join(folder, "states"))


def momentum(trainer: Any, device: int = 0) -> bytes:
    from gluon_esgd.states.values import plain

    arrays: List[bytes] = []

    def take(value: Any) -> None:
        if isinstance(value, (list, tuple)) and not hasattr(value, "host"):
            for item in value:
                take(item)
        elif value is not None:
            arrays.append(value.host.tobytes())

    for index in sorted(trainer._updaters[device].states):
        take(plain(trainer._updaters[device].states[index]))
    return b"".join(arrays)


def seen_center(net: Any, trainer: Any, sync: bool = False) -> bytes:
    with trainer.center(sync):
        return flat(net).tobytes()


def _uninterrupted(folder: str, case: str, lazy: int) -> Tuple[bytes, bytes, bytes]:
    net = network()
    trainer = make(case, net, lazy=lazy)
    train(net, trainer, 0, SAVED)
    save(net, trainer, folder)
    train(net, trainer, SAVED, STEPS)
    return flat(net).tobytes(), seen_center(net, trainer), momentum(trainer)


def _resumed(folder: str, case: str, lazy: int, again: bool = False) -> Tuple[bytes, bytes, bytes]:
    net = network(seed=8)
    trainer = make(case, net, 0.1 if case == "schedule" else 0.9, lazy=lazy)
    load(net, trainer, folder)
    if again:  # saved before a step, it is the same file
        trainer.save_states(os.path.join(folder, "states"))
        trainer.load_states(os.path.join(folder, "states"))
    train(net, trainer, SAVED, STEPS)
    return flat(net).tobytes(), seen_center(net, trainer), momentum(trainer)


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
    whole = pool.run(_uninterrupted, str(tmp_path), case, lazy)
    resumed = pool.run(_resumed, str(tmp_path), case, lazy)
    assert whole[0] == whole[1] and resumed == whole
    assert whole[0][2] != b""


@pytest.mark.servers
@pytest.mark.parametrize("rule", ["esgd", "asgd"])
def test_a_new_process_goes_on_to_the_bit(pools: Pools, rule: str, tmp_path: Path) -> None:
    whole = pools.get(Shape(2, 1, 1, rule)).run(_uninterrupted, str(tmp_path), "momentum", 3)
    other = Shape(2, 1, 1, rule, settings=(("OMP_NUM_THREADS", "1"),))  # another pool
    assert pools.get(other).run(_resumed, str(tmp_path), "momentum", 3, True) == whole


def _two_clients(folder: str, case: str) -> Dict[str, Any]:
    """Save at step 5, go on in a new trainer, and compare with what was there."""
    from gluon_esgd import world

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
    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.9})
    net.load_parameters(os.path.join(folder, f"net{client}"))
    trainer.load_states(os.path.join(folder, "states" + (f".client{client}" if client else "")))
    x, y = batches()
    train_step(net, trainer, x[SAVED + 3 * client], y[SAVED + 3 * client])
    return flat(net)


@pytest.mark.servers
@pytest.mark.parametrize("rule", ["esgd", "asgd"])
def test_two_clients_go_on_each_with_its_own(pools: Pools, rule: str, tmp_path: Path) -> None:
    from gluon_esgd.states import decode

    results = pools.get(Shape(4, 2, 1, rule)).run(_two_clients, str(tmp_path), "momentum")
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
    if rule == "asgd":  # each counts on from the center that it took, not from the one there is
        for position, result in zip(positions, results[::2]):
            np.testing.assert_array_equal(result["base"], position.base.host)


def _rounds(folder: str, replaced: bool) -> Tuple[np.ndarray, np.ndarray, bytes]:
    from gluon_esgd import world

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
@pytest.mark.parametrize("rule", ["esgd", "asgd"])
def test_a_client_without_a_file_takes_the_center(pools: Pools, rule: str, tmp_path: Path) -> None:
    pools.get(Shape(2, 1, 1, rule)).run(_uninterrupted, str(tmp_path), "momentum", 1)
    results = pools.get(Shape(4, 2, 1, rule)).run(_new_client, str(tmp_path))
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


BACK = [
    pytest.param(Shape(2), marks=pytest.mark.mpi, id="mpi"),
    pytest.param(Shape(2, 1, 1, "esgd"), marks=pytest.mark.servers, id="esgd"),
    pytest.param(Shape(2, 1, 1, "asgd"), marks=pytest.mark.servers, id="asgd"),
    pytest.param(Shape(4, 2, 0, "esgd"), marks=pytest.mark.mpi, id="split"),
    pytest.param(Shape(4, 2, 1, "sgd"), marks=pytest.mark.servers, id="sgd"),
]


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
def test_a_center_is_replaced_to_the_bit(pools: Pools, tmp_path: Path) -> None:
    for wrong, _ in pools.get(Shape(4, 2, 1, "esgd")).run(_far_apart, str(tmp_path)):
        assert wrong == 0


# Other ranks, other contexts, other formats.


def _saved_by(folder: str) -> bytes:
    net = network()
    trainer = make("adam", net)
    train(net, trainer, 0, SAVED)
    save(net, trainer, folder)
    remembered = momentum(trainer)
    train(net, trainer, SAVED, STEPS)
    trainer.finish()
    return flat(net).tobytes() + remembered


def _loaded_by(folder: str, contexts: int) -> List[Tuple[np.ndarray, bytes]]:
    from gluon_esgd import ElasticTrainer, world

    places = [mx.cpu(i) for i in range(contexts)]
    net = network(seed=4, ctx=places)
    trainer = ElasticTrainer(
        net.collect_params(), "adam", {"learning_rate": 0.9}, update_on_kvstore=False
    )
    net.load_parameters(os.path.join(folder, "net0"), ctx=places)
    trainer.load_states(os.path.join(folder, "states"))
    remembered = [momentum(trainer, device) for device in range(contexts)]
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    mine = shares(BATCH, [1] * world().size)[world().rank]
    x, y = batches()
    for i in range(SAVED, STEPS):
        parts = gluon.utils.split_and_load(mx.nd.array(x[i][mine]), places)
        labels = gluon.utils.split_and_load(mx.nd.array(y[i][mine]), places)
        with mx.autograd.record():
            losses = [loss_of(net(a), b) for a, b in zip(parts, labels)]
        for loss in losses:
            loss.backward()
        trainer.step(len(x[i][mine]))
    trainer.finish()
    params = list(net.collect_params().values())
    return [
        (np.concatenate([p.data(place).asnumpy().ravel() for p in params]), kept)
        for place, kept in zip(places, remembered)
    ]


OTHERS = [
    pytest.param(Shape(2), Shape(3), 1, id="2 to 3"),
    pytest.param(Shape(2), None, 1, id="2 to 1"),
    pytest.param(Shape(2), None, 2, id="2 to 1 with 2 contexts"),
    pytest.param(Shape(2), Shape(2), 2, id="2 to 2 with 2 contexts"),
    pytest.param(None, Shape(3), 1, id="1 to 3"),
    pytest.param(None, Shape(2), 2, id="1 to 2 with 2 contexts"),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("shape", "other", "contexts"), OTHERS)
def test_any_number_of_ranks_and_contexts_loads(
    pools: Pools, shape: Any, other: Any, contexts: int, tmp_path: Path
) -> None:
    """One rank writes Gluon's own file, several ours."""
    folder = str(tmp_path)
    said = _saved_by(folder) if shape is None else pools.get(shape).run(_saved_by, folder)[0]
    results = [_loaded_by(folder, contexts)] if other is None else pools.get(other).run(
        _loaded_by, folder, contexts
    )  # fmt: skip
    size = network().collect_params()
    count = sum(p.data().size for p in size.values())
    whole, remembered = np.frombuffer(said[: 4 * count], "f"), said[4 * count :]
    for result in results:
        for weights, kept in result:
            assert kept == remembered
            np.testing.assert_allclose(weights, whole, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(weights, results[0][0][0])


def _from_gluon(folder: str, bare: bool) -> Dict[str, Any]:
    from gluon_esgd import ElasticTrainer

    net = network(seed=3)
    settings = {"learning_rate": 0.9, "momentum": 0.9 if bare else 0.0}
    trainer = ElasticTrainer(net.collect_params(), "sgd", settings, interval=INTERVAL)
    net.load_parameters(os.path.join(folder, "net"))
    trainer.load_states(os.path.join(folder, "states"))
    found = {
        "momentum": momentum(trainer),
        "rate": trainer.learning_rate,
        "step": trainer._replica._step,
        "kept": trainer.optimizer.momentum,
    }
    train(net, trainer, SAVED, SAVED + 1)
    trainer.finish()
    return found


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 1, "esgd"), marks=pytest.mark.servers),
        pytest.param(Shape(4, 2, 1, "sgd"), marks=pytest.mark.servers),
    ],
)
def test_a_file_of_plain_gluon_loads(
    pools: Pools, shape: Shape, bare: bool, tmp_path: Path
) -> None:
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    x, y = batches()
    for i in range(SAVED):
        train_step(net, trainer, x[i], y[i])
    net.save_parameters(str(tmp_path / "net"))
    (tmp_path / "states").write_bytes(trainer._updaters[0].get_states(dump_optimizer=not bare))
    for found in pools.get(shape).run(_from_gluon, str(tmp_path), bare):
        assert found["momentum"] == momentum(trainer)
        assert found["kept"] == 0.9
        assert (found["rate"], found["step"]) == ((0.9, 0) if bare else (0.1, SAVED))


def _on_the_leader_only(folder: str) -> Tuple[bool, bytes, bytes]:
    """Each rank in a folder of its own, with one relative name."""
    from gluon_esgd import world

    before = os.getcwd()
    os.makedirs(os.path.join(folder, str(world().rank)))
    os.chdir(os.path.join(folder, str(world().rank)))
    try:
        net = network()
        trainer = make("momentum", net)
        train(net, trainer, 0, SAVED)
        trainer.save_states("states")
        again = network()
        resumed = make("momentum", again, 0.9)
        resumed.load_states("states")
        return os.path.exists("states"), momentum(resumed), momentum(trainer)
    finally:
        os.chdir(before)


@pytest.mark.mpi
def test_only_the_leader_needs_the_file(pools: Pools, tmp_path: Path) -> None:
    results = pools.get(Shape(2)).run(_on_the_leader_only, str(tmp_path))
    assert [there for there, _, _ in results] == [True, False]
    assert results[0][1] == results[1][1] == results[0][2] != b""


def _half_precision(folder: str) -> List[List[bytes]]:
    """fp16 weights with fp32 masters, before, after loading, and some steps later in both."""
    from gluon_esgd import ElasticTrainer, world

    seen: List[List[bytes]] = []
    trainers = []
    settings = {"momentum": 0.9, "multi_precision": True}
    interval = {"interval": INTERVAL} if world().settings.num_servers else {}
    for rate in (0.1, 0.9):
        params = parameters("float16")
        trainers.append(
            ElasticTrainer(params, "sgd", dict(settings, learning_rate=rate), **interval)
        )
    fname = os.path.join(folder, "states")

    def look() -> None:
        seen.append([values(t._params) + momentum(t) for t in trainers])

    for number in range(SAVED):
        step(trainers[0]._params, trainers[0], number)
    trainers[0].save_states(fname)
    for one, other in zip(trainers[0]._params, trainers[1]._params):
        other.set_data(one.data())
    trainers[1].load_states(fname)
    look()
    for number in range(SAVED, STEPS):
        for trainer in trainers:
            step(trainer._params, trainer, number)
    look()
    for trainer in trainers:
        trainer.finish()
    return seen


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        pytest.param(Shape(2, 1, 1, "esgd"), marks=pytest.mark.servers),
        pytest.param(Shape(2, 1, 1, "asgd"), marks=pytest.mark.servers),
    ],
)
def test_masters_of_half_precision_weights_come_back(
    pools: Pools, shape: Shape, tmp_path: Path
) -> None:
    results = pools.get(shape).run(_half_precision, str(tmp_path))
    for loaded, later in results:
        assert loaded[0] == loaded[1] and later[0] == later[1]
        assert (loaded, later) == tuple(results[0])


def _deferred(folder: str) -> Tuple[bytes, bytes]:
    """Loaded before the parameters have a shape."""
    net = network(deferred=True)
    trainer = make("momentum", net, 0.9)
    trainer.load_states(os.path.join(folder, "states"))
    net.load_parameters(os.path.join(folder, "net0"))
    train(net, trainer, SAVED, STEPS)
    return flat(net).tobytes(), momentum(trainer)


@pytest.mark.mpi
def test_deferred_parameters(pools: Pools, tmp_path: Path) -> None:
    pool = pools.get(Shape(2))
    whole = pool.run(_uninterrupted, str(tmp_path), "momentum", 1)
    for weights, remembered in pool.run(_deferred, str(tmp_path)):
        assert (weights, remembered) == (whole[0][0], whole[0][2])


def _deferred_narrower(folder: str) -> str:
    """What the shapes are shows when the first samples come."""
    net = network(deferred=True)
    trainer = make("momentum", net)
    trainer.load_states(os.path.join(folder, "states"))
    x, y = batches()
    try:
        train_step(net, trainer, x[0][:, :4], y[0])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.servers
def test_a_center_of_another_network_is_refused_at_the_start(pools: Pools, tmp_path: Path) -> None:
    pool = pools.get(Shape(2, 1, 1, "esgd"))
    pool.run(_uninterrupted, str(tmp_path), "momentum", 1)
    wanted = (
        "the states that were loaded hold a center of 163 floats, but the network has 131: load "
        "those that were saved with this network"
    )
    assert pool.run(_deferred_narrower, str(tmp_path)) == [wanted] * 2


# What goes wrong is said on all ranks, and leaves the trainer as it was.


def _refused(names: List[str], kind: str) -> List[Tuple[str, str]]:
    from gluon_esgd import ElasticTrainer

    net = network(hidden=5) if kind == "wide" else network()
    params = net.collect_params()
    given = list(params.values())[:2] if kind == "few" else params
    trainer = ElasticTrainer(given, "adam" if kind == "adam" else "sgd", {"learning_rate": 0.1})
    said = []
    for name in names:
        try:
            trainer.load_states(name)
            said.append(("", ""))
        except (ValueError, OSError) as error:
            said.append((type(error).__name__, str(error)))
    before = flat(net)
    if kind != "few":
        x, y = batches()
        train_step(net, trainer, x[0], y[0])
        assert trainer.learning_rate == 0.1 and (flat(net) != before).any()
    trainer.finish()
    return said


@pytest.mark.mpi
def test_bad_files_are_said_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    pool = pools.get(Shape(2))
    pool.run(_uninterrupted, str(tmp_path), "momentum", 1)
    good = tmp_path / "states"
    names = {name: str(tmp_path / name) for name in ("none", "cut", "foreign", "empty", "folder")}
    Path(names["cut"]).write_bytes(good.read_bytes()[:-100])
    Path(names["foreign"]).write_text("lr: 0.1\n")
    Path(names["empty"]).touch()
    Path(names["folder"]).mkdir()
    results = pool.run(_refused, list(names.values()), "plain")
    assert results[0] == results[1]
    wanted = [
        ("FileNotFoundError", f"[Errno 2] No such file or directory: '{names['none']}'"),
        (
            "ValueError",
            f"{names['cut']} is damaged or was cut short (BadZipFile: File is not a zip file)",
        ),
        (
            "ValueError",
            f"{names['foreign']} is no states file of gluon_esgd or gluon.Trainer, or was cut",
        ),
        ("ValueError", f"{names['empty']} is empty: it is no states file"),
        ("IsADirectoryError", f"[Errno 21] Is a directory: '{names['folder']}'"),
    ]
    for (kind, text), (kind_wanted, text_wanted) in zip(results[0], wanted):
        assert kind == kind_wanted and text.startswith(text_wanted)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "adam",
            "holds the states of optimizer 'SGD', but the trainer has 'Adam': make the trainer "
            "with 'SGD'",
        ),
        ("few", "is of 4 parameters, but the trainer has 2"),
        ("wide", r"has shape \(16,\) for parameter 0, but \w+0_bias of the trainer has \(5,\)"),
    ],
)
def test_a_file_of_another_trainer_is_refused_on_all_ranks(
    pools: Pools, kind: str, message: str, tmp_path: Path
) -> None:
    pool = pools.get(Shape(2))
    pool.run(_uninterrupted, str(tmp_path), "momentum", 1)
    for ((name, text),) in pool.run(_refused, [str(tmp_path / "states")], kind):
        assert name == "ValueError"
        assert re.fullmatch(re.escape(str(tmp_path / "states")) + " " + message, text)


def _unlike_ranks(folder: str) -> str:
    """The scheduler is one of the script, and on rank 1 the trainer has none."""
    from gluon_esgd import ElasticTrainer, world

    fname = os.path.join(folder, "states")
    trainers = [
        ElasticTrainer(
            network().collect_params(),
            mx.optimizer.SGD(lr_scheduler=OwnSchedule(0.1), learning_rate=0.1),
        )
        for _ in range(2)
    ]
    trainers[0].save_states(fname)
    if world().rank == 1:
        trainers[1].optimizer.lr_scheduler = None
    try:
        trainers[1].load_states(fname)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.mpi
def test_what_one_rank_refuses_all_refuse(pools: Pools, tmp_path: Path) -> None:
    said = pools.get(Shape(2)).run(_unlike_ranks, str(tmp_path))
    assert said[0] == said[1]
    assert said[0].startswith(f"rank 1: {tmp_path / 'states'} has a learning rate scheduler")


class _Talkative(mx.optimizer.SGD):
    """Its state is more than arrays."""

    def create_state(self, index: int, weight: Any) -> Any:
        return {1, 2}


def _cannot_save(folder: str) -> List[Tuple[str, str]]:
    from gluon_esgd import ElasticTrainer

    net = network()
    trainer = make("momentum", net)
    train(net, trainer, 0, 1)
    odd = ElasticTrainer(net.collect_params(), _Talkative(learning_rate=0.1))
    train(net, odd, 0, 1)
    said = []
    os.makedirs(os.path.join(folder, "taken", "inside"), exist_ok=True)
    for each, name in ((trainer, "nowhere/states"), (trainer, "taken"), (odd, "states")):
        try:
            each.save_states(os.path.join(folder, name))
        except (ValueError, OSError) as error:
            said.append((type(error).__name__, str(error)))
    trainer.save_states(os.path.join(folder, "good"))
    return said


@pytest.mark.mpi
def test_what_cannot_be_saved_is_said_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    results = pools.get(Shape(2)).run(_cannot_save, str(tmp_path))
    nowhere = tmp_path / "nowhere" / "states"
    assert results[0] == results[1] == [
        ("FileNotFoundError", f"[Errno 2] No such file or directory: '{nowhere}'"),
        ("IsADirectoryError", f"[Errno 21] Is a directory: '{tmp_path / 'taken'}'"),
        (
            "ValueError",
            "optimizer '_Talkative' keeps a set in its state of parameter 0, which a states file "
            "does not hold: only numbers and dense arrays",
        ),
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "taken"]


def _around_the_center(folder: str) -> Tuple[bool, str]:
    fname = os.path.join(folder, "states")
    net = network()
    trainer = make("momentum", net)
    trainer.save_states(fname)  # before the first step
    train(net, trainer, 0, SAVED)
    trainer.save_states(fname)
    before = momentum(trainer)
    said = ""
    with trainer.center():
        trainer.save_states(fname)
        try:
            trainer.load_states(fname)
        except RuntimeError as error:
            said = str(error)
    trainer.load_states(fname)
    return momentum(trainer) == before and trainer._replica._step == SAVED, said


@pytest.mark.parametrize("shape", BACK)
def test_states_and_the_center(pools: Pools, shape: Shape, tmp_path: Path) -> None:
    for same, said in pools.get(shape).run(_around_the_center, str(tmp_path)):
        assert same
        assert said == (
            "the network holds the center's weights: leave `with trainer.center():` before "
            "loading states"
        )


def _scaler(folder: str) -> Tuple[float, float, int]:
    from mxnet.contrib.amp.loss_scaler import LossScaler

    trainers = [make("momentum", network()) for _ in range(2)]
    for trainer in trainers:
        trainer._amp_loss_scaler = LossScaler()
    scaler = trainers[0]._amp_loss_scaler
    scaler._loss_scale, scaler._next_loss_scale, scaler._unskipped = 512.0, 1024.0, 77
    trainers[0].save_states(os.path.join(folder, "states"))
    trainers[1].load_states(os.path.join(folder, "states"))
    other = trainers[1]._amp_loss_scaler
    return other._loss_scale, other._next_loss_scale, other._unskipped


@pytest.mark.mpi
def test_the_loss_scale_comes_back(pools: Pools, tmp_path: Path) -> None:
    assert pools.get(Shape(2)).run(_scaler, str(tmp_path)) == [(512.0, 1024.0, 77)] * 2


@pytest.mark.servers
def test_a_file_goes_from_one_rule_to_another(pools: Pools, tmp_path: Path) -> None:
    for one, other in (("esgd", "asgd"), ("asgd", "esgd")):
        folder = tmp_path / one
        folder.mkdir()
        pools.get(Shape(2, 1, 1, one)).run(_uninterrupted, str(folder), "momentum", 1)
        resumed = pools.get(Shape(2, 1, 1, other)).run(_resumed, str(folder), "momentum", 1)
        assert resumed[0] == resumed[1]
        shutil.rmtree(folder)
    assert digest(network()) == digest(network())
