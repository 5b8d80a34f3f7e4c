"""States files of one process: Gluon's own are written, and read without running their code."""

from __future__ import annotations

import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer
from gluon_esgd.states import States, apply, check, collect, decode, encode

from .problems import batches, flat, network, train_step

SAVED, STEPS = 5, 12
SPECIAL: Dict[str, Dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "lars": {"momentum": 0.9},
    "signum": {"momentum": 0.9},
    "lbsgd": {"momentum": 0.9, "batch_scale": 2},
    "rmsprop": {"centered": True},
    "test": {},
}
OPTIMIZERS = sorted({*mx.optimizer.Optimizer.opt_registry} - {"ownoptimizer"})


def parameters(dtype: str = "float32", ctx: Any = None) -> List[gluon.Parameter]:
    """Two matrices, which even GroupAdaGrad takes."""
    out = []
    for i, shape in enumerate([(3, 4), (2, 3)]):
        param = gluon.Parameter(f"p{i}_weight", shape=shape, dtype=dtype)
        param.initialize(ctx=ctx or mx.cpu())
        param.set_data(mx.nd.array(np.random.RandomState(i).randn(*shape), dtype=dtype))
        out.append(param)
    return out


def step(params: List[gluon.Parameter], trainer: Any, number: int) -> None:
    """A step with gradients made by hand, which half floats need."""
    for i, param in enumerate(params):
        gradient = np.random.RandomState(10 * number + i).randn(*param.shape)
        for grad, data in zip(param.list_grad(), param.list_data()):
            grad[:] = mx.nd.array(gradient, dtype=grad.dtype)
            data._fresh_grad = True
    mx.random.seed(number)  # SGLD draws
    trainer.step(2)


def make(kind: type, name: str, params: List[gluon.Parameter], rate: float, **kwargs: Any) -> Any:
    settings = dict(SPECIAL.get(name, {}), learning_rate=rate)
    if params[0].dtype == "float16" or params[0].dtype is np.float16:
        settings["multi_precision"] = True
    return kind(params, name, settings, **kwargs)


def values(params: List[gluon.Parameter]) -> bytes:
    return b"".join(d.asnumpy().tobytes() for p in params for d in p.list_data())


def copy_data(source: List[gluon.Parameter], to: List[gluon.Parameter]) -> None:
    for one, other in zip(source, to):
        other.set_data(one.data())


CASES = [(name, "float32") for name in OPTIMIZERS] + [
    (name, "float16") for name in ("sgd", "nag", "adam", "lamb", "lars")
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_optimizer_goes_on_as_with_gluon(name: str, dtype: str, tmp_path: Path) -> None:
    """Written by either, read by either, and through our own format: the same bits."""
    params = parameters(dtype)
    trainer = make(gluon.Trainer, name, params, 0.01)
    ours = make(ElasticTrainer, name, parameters(dtype), 0.01)
    for number in range(SAVED):
        step(params, trainer, number)
        step(ours._params, ours, number)
    trainer.save_states(str(tmp_path / "gluon"))
    ours.save_states(str(tmp_path / "ours"))
    own = encode(collect(trainer._optimizer, trainer._updaters[0]))
    resumed = []
    for kind, path in [
        (ElasticTrainer, "gluon"),
        (gluon.Trainer, "ours"),
        (ElasticTrainer, "ours"),
        (ElasticTrainer, "npz"),
    ]:
        again = parameters(dtype)
        copy_data(params, again)
        resumed.append(make(kind, name, again, 0.5))
        (tmp_path / "npz").write_bytes(own)
        resumed[-1].load_states(str(tmp_path / path))
    for number in range(SAVED, STEPS):
        for each in (trainer, *resumed):
            step(each._params, each, number)
    for each in resumed:
        assert values(each._params) == values(params)
        assert each.learning_rate == trainer.learning_rate


STORES: List[Tuple[Any, Any]] = [
    ("device", None), ("device", True), ("local", True), ("device", False), (None, None)
]  # fmt: skip


LEFT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Gluon's


@LEFT_OPEN
@pytest.mark.parametrize(("kvstore", "update_on_kvstore"), STORES)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_two_contexts_and_updates_in_the_store(
    name: str, kvstore: Any, update_on_kvstore: Any, tmp_path: Path
) -> None:
    contexts = [mx.cpu(0), mx.cpu(1)]
    how = {"kvstore": kvstore, "update_on_kvstore": update_on_kvstore}
    params = parameters(ctx=contexts)
    trainer = make(ElasticTrainer, name, params, 0.01, **how)
    for number in range(SAVED):
        step(params, trainer, number)
    fname = str(tmp_path / "states")
    trainer.save_states(fname)
    resumed = []
    for kind in (gluon.Trainer, ElasticTrainer):
        again = parameters(ctx=contexts)
        copy_data(params, again)
        resumed.append(make(kind, name, again, 0.5, **how))
        resumed[-1].load_states(fname)
    for number in range(SAVED, STEPS):
        for each in (trainer, *resumed):
            step(each._params, each, number)
    assert values(resumed[0]._params) == values(resumed[1]._params) == values(params)


@pytest.mark.parametrize("name", ["adam", "nadam"])
def test_other_contexts_count_on_from_those_that_were_there(name: str, tmp_path: Path) -> None:
    """Gluon starts Adam's bias correction anew on a device that is not in the file."""
    params = parameters()
    trainer = make(ElasticTrainer, name, params, 0.01)
    for number in range(SAVED):
        step(params, trainer, number)
    trainer.save_states(str(tmp_path / "states"))
    for ctx in ([mx.cpu(1)], [mx.cpu(0), mx.cpu(1)]):
        again = parameters(ctx=ctx)
        copy_data(params, again)
        other = make(ElasticTrainer, name, again, 0.5, update_on_kvstore=False)
        other.load_states(str(tmp_path / "states"))
        counts = other.optimizer._all_index_update_counts
        assert all(counts[c.device_id] == {0: SAVED, 1: SAVED} for c in ctx)
        for updater, context in zip(other._updaters, ctx):
            assert {a.context for row in updater.states.values() for a in row} == {context}
        step(again, other, SAVED)
        first = [d.asnumpy() for p in again for d in p.list_data()[:1]]
        last = [d.asnumpy() for p in again for d in p.list_data()[-1:]]
        if name == "adam":
            np.testing.assert_array_equal(np.concatenate(first, None), np.concatenate(last, None))


def _saved(tmp_path: Path, name: str = "sgd", **settings: Any) -> Tuple[Any, Any, str]:
    net = network()
    trainer = gluon.Trainer(net.collect_params(), name, {"learning_rate": 0.1, **settings})
    x, y = batches()
    for i in range(SAVED):
        train_step(net, trainer, x[i], y[i])
    fname = str(tmp_path / "states")
    trainer.save_states(fname)
    return net, trainer, fname


def _loaded(fname: str, net: Any, kind: type = ElasticTrainer, **settings: Any) -> Any:
    again = network(seed=4)
    for one, other in zip(net.collect_params().values(), again.collect_params().values()):
        other.set_data(one.data())
    trainer = kind(again.collect_params(), "sgd", {"learning_rate": 0.7, **settings})
    trainer.load_states(fname)
    return again, trainer


def test_the_optimizer_stays_the_same_object_with_its_own_parameters(tmp_path: Path) -> None:
    net, _, fname = _saved(tmp_path, momentum=0.9)
    again = network()
    trainer = ElasticTrainer(again.collect_params(), "sgd", {"learning_rate": 0.7})
    before = trainer.optimizer
    trainer.load_states(fname)
    assert trainer.optimizer is before and trainer._updaters[0].optimizer is before
    assert (trainer.learning_rate, before.momentum, before.num_update) == (0.1, 0.9, SAVED)
    assert before.param_dict == dict(enumerate(trainer._params))
    moved = []
    for multiplier in (1.0, 2.0):
        again, trainer = _loaded(fname, net)
        for param in again.collect_params().values():
            param.lr_mult = multiplier
        trainer.optimizer.momentum = 0.0
        start = flat(again)
        train_step(again, trainer, *(part[0] for part in batches()))
        moved.append(flat(again) - start)
    np.testing.assert_allclose(moved[1], 2 * moved[0], rtol=1e-3, atol=1e-7)


def test_bare_states_change_states_only(tmp_path: Path) -> None:
    net, trainer, fname = _saved(tmp_path, momentum=0.9)
    Path(fname).write_bytes(trainer._updaters[0].get_states(dump_optimizer=False))
    _, other = _loaded(fname, net, momentum=0.9)
    assert other.learning_rate == 0.7 and other.optimizer.num_update == 0
    for index, state in trainer._updaters[0].states.items():
        np.testing.assert_array_equal(state.asnumpy(), other._updaters[0].states[index].asnumpy())


class OwnOptimizer(mx.optimizer.SGD):
    """As a script may define it, with attributes of all kinds."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.table = {"a": [1, (2.5, None)], 3: True}
        self.half = np.float16(0.1)
        self.vector = np.arange(6, dtype=np.int64).reshape(2, 3).T
        self.marks = mx.np.array([1.0, 2.0])
        self.endless = float("inf")
        self.helper = logging.getLogger("x")  # nothing that can be said


def _own(value: float) -> OwnOptimizer:
    optimizer = OwnOptimizer(learning_rate=value, momentum=0.9)
    optimizer.table["a"][0] = value
    optimizer.half = np.float16(value)
    optimizer.vector = optimizer.vector * int(10 * value)
    optimizer.marks = optimizer.marks * value
    optimizer.endless = value
    return optimizer


@pytest.mark.parametrize("protocol", [*range(pickle.HIGHEST_PROTOCOL + 1), None])
def test_attributes_come_back_whatever_wrote_them(protocol: Any, tmp_path: Path) -> None:
    updater = mx.optimizer.get_updater(_own(0.5))
    updater.optimizer.endless = float("inf")
    updater(0, mx.nd.ones((2,)), mx.nd.ones((2,)))
    if protocol is None:
        data = encode(collect(updater.optimizer, updater))
    else:
        data = pickle.dumps((updater.states, updater.optimizer), protocol)
    states = decode(data, "f")
    assert states.optimizer == "OwnOptimizer"
    optimizer = _own(0.25)
    helper = optimizer.helper = logging.getLogger("own")
    other = mx.optimizer.get_updater(optimizer)
    param = gluon.Parameter("p", shape=(2,))
    param.initialize()
    check(states, optimizer, [param], "f")
    said = apply(states, optimizer, [other], [param])
    assert optimizer.table == {"a": [0.5, (2.5, None)], 3: True}
    assert optimizer.half == np.float16(0.5) and type(optimizer.half) is np.float16
    np.testing.assert_array_equal(optimizer.vector, 5 * np.arange(6).reshape(2, 3).T)
    assert optimizer.vector.dtype == np.int64 and optimizer.endless == float("inf")
    assert type(optimizer.marks) is mx.np.ndarray
    np.testing.assert_array_equal(optimizer.marks.asnumpy(), [0.5, 1.0])
    assert (optimizer.lr, optimizer.num_update) == (0.5, 1)
    np.testing.assert_array_equal(other.states[0].asnumpy(), updater.states[0].asnumpy())
    assert optimizer.helper is helper
    assert said == [
        "attributes of the optimizer that a states file does not hold stay as they are: helper"
    ]


def test_arrays_of_any_type_and_shape_survive() -> None:
    state = [
        None,
        (mx.nd.array([1, 2], dtype="float16"), mx.nd.ones((1, 2, 3), dtype="float64")),
        [mx.nd.array([1, 2], dtype="int32"), mx.np.ones((2,), dtype="uint8"), 3, "text", 2.5],
        {"a": mx.nd.array([7], dtype="int64"), 4: np.float64(0.1)},
        np.zeros((0, 3), np.float32),
    ]
    updater = mx.optimizer.get_updater(mx.optimizer.SGD())
    updater.states = {0: state}
    own = decode(encode(collect(updater.optimizer, updater)), "f")
    gluons = decode(updater.get_states(), "f")
    param = gluon.Parameter("p", shape=(2,))
    param.initialize()
    for states in (own, gluons):
        other = mx.optimizer.get_updater(mx.optimizer.SGD())
        apply(states, other.optimizer, [other], [param])
        assert _described(other.states[0]) == _described(state)


def _described(value: Any) -> Any:
    if isinstance(value, (mx.nd.NDArray, np.ndarray)):
        host = value.asnumpy() if isinstance(value, mx.nd.NDArray) else value
        return (type(value).__name__, str(host.dtype), host.shape, host.tobytes())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [_described(item) for item in value])
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    return (type(value).__name__, value)


@LEFT_OPEN
def test_row_sparse_weights_and_their_momentum(tmp_path: Path) -> None:
    def make_one(kind: type) -> Tuple[Any, Any]:
        param = gluon.Parameter("w", shape=(6, 2), stype="row_sparse", grad_stype="row_sparse")
        param.initialize(mx.init.One())
        return param, kind([param], "sgd", {"learning_rate": 0.1, "momentum": 0.9})

    def run(param: Any, trainer: Any) -> np.ndarray:
        rows = mx.nd.array([0, 2, 3])
        for _ in range(2):
            with mx.autograd.record():
                loss = mx.nd.sparse.dot(
                    mx.nd.array([[1, 0, 2, 3, 0, 0]]).tostype("csr"), param.row_sparse_data(rows)
                ).sum()
            loss.backward()
            trainer.step(1)
        return param.row_sparse_data(mx.nd.arange(6)).asnumpy()

    fname, results = str(tmp_path / "s"), []
    param, trainer = make_one(gluon.Trainer)
    run(param, trainer)
    trainer.save_states(fname)
    for kind in (gluon.Trainer, ElasticTrainer):
        other, again = make_one(kind)
        again.load_states(fname)
        results.append(run(other, again))
    np.testing.assert_array_equal(results[0], results[1])
    own = mx.optimizer.get_updater(trainer._kvstore._updater.optimizer)
    own.states = trainer._kvstore._updater.states
    message = "optimizer 'SGD' keeps a RowSparseNDArray in its state of parameter 0, which a"
    with pytest.raises(ValueError, match=message):
        collect(own.optimizer, own)


# What a file may try.


class Evil:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


class SGD:
    """Of the trainer's name, with something else inside."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


EVIL: List[Tuple[str, Callable[[Any], Any]]] = [
    ("is a pickle, but not of optimizer states", lambda evil: evil),
    ("is a pickle, but not of optimizer states", lambda evil: ({}, evil)),
    (r"has a (posix|nt)\.system among its states, which is not loaded", lambda evil: {0: evil}),
    (r"has a (posix|nt)\.system among its states", lambda evil: ({0: (None, evil)}, SGD(lr=1))),
    ("has a dict|has a posix", lambda evil: {0: {evil: 1}}),
    ("", lambda evil: ({}, SGD(helper=evil, lr=0.3))),
    ("has a learning rate scheduler posix.system", lambda evil: ({}, SGD(lr_scheduler=evil))),
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(("message", "around"), EVIL)
def test_nothing_in_a_file_is_run(
    message: str, around: Callable[[Any], Any], protocol: int, tmp_path: Path
) -> None:
    mark, fname = tmp_path / "mark", tmp_path / "states"
    fname.write_bytes(pickle.dumps(around(Evil(str(mark))), protocol))
    trainer = ElasticTrainer(network().collect_params(), "sgd", {"learning_rate": 0.1})
    if message:
        with pytest.raises(ValueError, match=message):
            trainer.load_states(str(fname))
        assert trainer.learning_rate == 0.1
    else:
        trainer.load_states(str(fname))
        assert trainer.learning_rate == 0.3 and not hasattr(trainer.optimizer, "helper")
    assert not mark.exists()
    pickle.loads(fname.read_bytes())
    assert mark.exists(), "the file is not as evil as it should be"


def _npz(**arrays: Any) -> bytes:
    import io

    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


GOOD = pickle.dumps(({}, mx.optimizer.SGD()))
OWN = encode(States({}, "SGD"))
BAD: List[Tuple[bytes, str]] = [
    (b"", "f is empty: it is no states file"),
    (b"hello", "f is no states file of gluon_esgd or gluon.Trainer, or was cut short"),
    (GOOD[:-9], "f is no states file of gluon_esgd or gluon.Trainer, or was cut short"),
    (pickle.dumps([1, 2]), "f is a pickle, but not of optimizer states, as gluon.Trainer"),
    (pickle.dumps({0: {1, 2}}), "f has a set among its states, which is not loaded"),
    (OWN[:-9], r"f is damaged or was cut short \(BadZipFile"),
    (OWN[: len(OWN) // 2], r"f is damaged or was cut short \(BadZipFile"),
    (OWN[:200] + b"!" + OWN[201:], r"f is damaged or was cut short \(BadZipFile: Bad CRC"),
    (_npz(a=np.ones(3)), "f is a zip archive, but no states file"),
    (_npz(json=np.array('{"format": "gluon_esgd states", "version": 2}')), "of version 2; this"),
    (_npz(json=np.array({}, dtype=object)), r"f is damaged or was cut short \(ValueError: Object"),
    (
        _npz(json=np.array('{"format": "gluon_esgd states", "version": 1, "body": {"dict": []}}')),
        r"f is damaged or was cut short \(KeyError: 'position'",
    ),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_what_is_no_states_file_is_said(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(data, "f")


@pytest.mark.parametrize("format_", ["gluon", "own"])
def test_files_of_another_trainer_change_nothing(format_: str, tmp_path: Path) -> None:
    net, trainer, fname = _saved(tmp_path, momentum=0.9)
    if format_ == "own":
        own = collect(trainer._optimizer, trainer._updaters[0])
        own.shapes = [list(p.shape) for p in trainer._params]
        Path(fname).write_bytes(encode(own))
    fewer, wider = network(), network(hidden=5)
    count = len(trainer._params)
    cases: List[Tuple[Any, str, str]] = [
        (
            net.collect_params(),
            "adam",
            "holds the states of optimizer 'SGD', but the trainer has 'Adam': make the trainer "
            "with 'SGD'",
        ),
        (
            list(fewer.collect_params().values())[:2],
            "sgd",
            "holds a state of parameter 2, but the trainer has 2 parameters: 0 to 1"
            if format_ == "gluon"
            else f"is of {count} parameters, but the trainer has 2",
        ),
        (
            wider.collect_params(),
            "sgd",
            f"has a state of shape (16,) for parameter 0, but {wider[0].bias.name} of the "
            "trainer needs (5,)"
            if format_ == "gluon"
            else f"has shape (16,) for parameter 0, but {wider[0].bias.name} of the trainer "
            "has (5,)",
        ),
    ]
    for params, name, message in cases:
        other = ElasticTrainer(params, name, {"learning_rate": 0.7})
        with pytest.raises(ValueError, match=re.escape(f"{fname} {message}")):
            other.load_states(fname)
        assert other.learning_rate == 0.7 and not other._updaters[0].states
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*nowhere'"):
        other.load_states(str(tmp_path / "nowhere"))


class CutSparse:
    """Pickled as a row-sparse array whose bytes were cut."""

    def __reduce__(self) -> Any:
        whole = mx.nd.ones((4, 2)).tostype("row_sparse").__getstate__()["handle"]
        return mx.nd.sparse.RowSparseNDArray, (None,), {"handle": whole[:40]}


def test_damaged_arrays_are_said() -> None:
    param = gluon.Parameter("p", shape=(4, 2))
    param.initialize()
    states = decode(pickle.dumps({0: CutSparse()}), "f")
    with pytest.raises(ValueError, match="f has a damaged state of parameter 0: MXNetError: Check"):
        check(states, mx.optimizer.SGD(momentum=0.9), [param], "f")
    whole = pickle.dumps({0: mx.nd.ones((4, 2))})
    magic = whole.index(b"\xc9\xfa\x93\xf9")
    for place, number in ((0, 1), (8, 77), (8, 0xFF), (12, 5), (36, 99)):
        broken = bytearray(whole)
        broken[magic + place] = number
        with pytest.raises(ValueError, match="f has an array in a format that is not known among"):
            decode(bytes(broken), "f")


class OwnSchedule(mx.lr_scheduler.LRScheduler):
    def __call__(self, num_update: int) -> float:
        return self.base_lr / (1 + num_update)


def doubled(num_update: int) -> float:
    return 0.1 * 2**num_update


def test_schedulers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def factor(step: int = 2) -> Any:
        return mx.lr_scheduler.FactorScheduler(step, 0.5, base_lr=0.1)

    net, _, fname = _saved(tmp_path, lr_scheduler=factor())
    own = factor(50)
    _, trainer = _loaded(fname, net, learning_rate=0.1, lr_scheduler=own)
    assert trainer.optimizer.lr_scheduler is own
    assert (own.step, own.count, trainer.learning_rate) == (2, 4, 0.025)
    _, trainer = _loaded(fname, net)
    assert type(trainer.optimizer.lr_scheduler) is mx.lr_scheduler.FactorScheduler
    assert trainer.learning_rate == 0.025
    assert not caplog.records
    net, _, fname = _saved(tmp_path)
    _, trainer = _loaded(fname, net, learning_rate=0.1, lr_scheduler=factor())
    assert trainer.learning_rate == 0.1 and trainer.optimizer.lr_scheduler is None
    assert "the trainer's FactorScheduler is taken away, as gluon.Trainer does" in caplog.text


@pytest.mark.parametrize("scheduler", [OwnSchedule(0.1), doubled])
@pytest.mark.parametrize("format_", ["gluon", "own"])
def test_schedulers_of_the_script(scheduler: Any, format_: str, tmp_path: Path) -> None:
    net, trainer, fname = _saved(tmp_path)
    trainer.optimizer.lr_scheduler = scheduler
    if format_ == "gluon":
        trainer.save_states(fname)
    else:
        Path(fname).write_bytes(encode(collect(trainer._optimizer, trainer._updaters[0])))
    name = getattr(scheduler, "__name__", type(scheduler).__name__)
    message = f"scheduler {re.escape(__name__)}.{name}, which is not made from a file: give the"
    with pytest.raises(ValueError, match=message):
        _loaded(fname, net)
    again = network()
    optimizer = mx.optimizer.SGD(learning_rate=0.7)
    own = optimizer.lr_scheduler = OwnSchedule(9.0) if scheduler is not doubled else doubled
    other = ElasticTrainer(again.collect_params(), optimizer)
    other.load_states(fname)
    assert other.optimizer.lr_scheduler is own
    assert other.learning_rate == trainer.learning_rate == scheduler(SAVED)
