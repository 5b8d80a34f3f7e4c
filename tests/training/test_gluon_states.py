"""States files of one process: Gluon's own are written and read, and training goes on alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer
from gluon_esgd.states import collect, encode

from .problems import batches, flat, network, train_step
from .states import (
    SAVED,
    STEPS,
    OwnSchedule,
    copy_data,
    doubled,
    loaded,
    make_plain,
    parameters,
    saved,
    step,
    values,
)

OPTIMIZERS = sorted({*mx.optimizer.Optimizer.opt_registry} - {"ownoptimizer"})


CASES = [(name, "float32") for name in OPTIMIZERS] + [
    (name, "float16") for name in ("sgd", "nag", "adam", "lamb", "lars")
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_optimizer_goes_on_as_with_gluon(name: str, dtype: str, tmp_path: Path) -> None:
    """Written by either, read by either, and through our own format: the same bits."""
    params = parameters(dtype)
    trainer = make_plain(gluon.Trainer, name, params, 0.01)
    ours = make_plain(ElasticTrainer, name, parameters(dtype), 0.01)
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
        resumed.append(make_plain(kind, name, again, 0.5))
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
    trainer = make_plain(ElasticTrainer, name, params, 0.01, **how)
    for number in range(SAVED):
        step(params, trainer, number)
    fname = str(tmp_path / "states")
    trainer.save_states(fname)
    resumed = []
    for kind in (gluon.Trainer, ElasticTrainer):
        again = parameters(ctx=contexts)
        copy_data(params, again)
        resumed.append(make_plain(kind, name, again, 0.5, **how))
        resumed[-1].load_states(fname)
    for number in range(SAVED, STEPS):
        for each in (trainer, *resumed):
            step(each._params, each, number)
    assert values(resumed[0]._params) == values(resumed[1]._params) == values(params)


@pytest.mark.parametrize("name", ["adam", "nadam"])
def test_other_contexts_count_on_from_those_that_were_there(name: str, tmp_path: Path) -> None:
    """Gluon starts Adam's bias correction anew on a device that is not in the file."""
    params = parameters()
    trainer = make_plain(ElasticTrainer, name, params, 0.01)
    for number in range(SAVED):
        step(params, trainer, number)
    trainer.save_states(str(tmp_path / "states"))
    for ctx in ([mx.cpu(1)], [mx.cpu(0), mx.cpu(1)]):
        again = parameters(ctx=ctx)
        copy_data(params, again)
        other = make_plain(ElasticTrainer, name, again, 0.5, update_on_kvstore=False)
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


def test_the_optimizer_stays_the_same_object_with_its_own_parameters(tmp_path: Path) -> None:
    net, _, fname = saved(tmp_path, momentum=0.9)
    again = network()
    trainer = ElasticTrainer(again.collect_params(), "sgd", {"learning_rate": 0.7})
    before = trainer.optimizer
    trainer.load_states(fname)
    assert trainer.optimizer is before and trainer._updaters[0].optimizer is before
    assert (trainer.learning_rate, before.momentum, before.num_update) == (0.1, 0.9, SAVED)
    assert before.param_dict == dict(enumerate(trainer._params))
    moved = []
    for multiplier in (1.0, 2.0):
        again, trainer = loaded(fname, net)
        for param in again.collect_params().values():
            param.lr_mult = multiplier
        trainer.optimizer.momentum = 0.0
        start = flat(again)
        train_step(again, trainer, *(part[0] for part in batches()))
        moved.append(flat(again) - start)
    np.testing.assert_allclose(moved[1], 2 * moved[0], rtol=1e-3, atol=1e-7)


def test_bare_states_change_states_only(tmp_path: Path) -> None:
    net, trainer, fname = saved(tmp_path, momentum=0.9)
    Path(fname).write_bytes(trainer._updaters[0].get_states(dump_optimizer=False))
    _, other = loaded(fname, net, momentum=0.9)
    assert other.learning_rate == 0.7 and other.optimizer.num_update == 0
    for index, state in trainer._updaters[0].states.items():
        np.testing.assert_array_equal(state.asnumpy(), other._updaters[0].states[index].asnumpy())


def test_schedulers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def factor(step: int = 2) -> Any:
        return mx.lr_scheduler.FactorScheduler(step, 0.5, base_lr=0.1)

    net, _, fname = saved(tmp_path, lr_scheduler=factor())
    own = factor(50)
    _, trainer = loaded(fname, net, learning_rate=0.1, lr_scheduler=own)
    assert trainer.optimizer.lr_scheduler is own
    assert (own.step, own.count, trainer.learning_rate) == (2, 4, 0.025)
    _, trainer = loaded(fname, net)
    assert type(trainer.optimizer.lr_scheduler) is mx.lr_scheduler.FactorScheduler
    assert trainer.learning_rate == 0.025
    assert not caplog.records
    net, _, fname = saved(tmp_path)
    _, trainer = loaded(fname, net, learning_rate=0.1, lr_scheduler=factor())
    assert trainer.learning_rate == 0.1 and trainer.optimizer.lr_scheduler is None
    assert "the trainer's FactorScheduler is taken away, as gluon.Trainer does" in caplog.text


@pytest.mark.parametrize("scheduler", [OwnSchedule(0.1), doubled])
@pytest.mark.parametrize("format_", ["gluon", "own"])
def test_schedulers_of_the_script(scheduler: Any, format_: str, tmp_path: Path) -> None:
    net, trainer, fname = saved(tmp_path)
    trainer.optimizer.lr_scheduler = scheduler
    if format_ == "gluon":
        trainer.save_states(fname)
    else:
        Path(fname).write_bytes(encode(collect(trainer._optimizer, trainer._updaters[0])))
    name = getattr(scheduler, "__name__", type(scheduler).__name__)
    name = re.escape(f"{scheduler.__module__}.{name}")
    message = f"scheduler {name}, which is not made from a file: give the"
    with pytest.raises(ValueError, match=message):
        loaded(fname, net)
    again = network()
    optimizer = mx.optimizer.SGD(learning_rate=0.7)
    own = optimizer.lr_scheduler = OwnSchedule(9.0) if scheduler is not doubled else doubled
    other = ElasticTrainer(again.collect_params(), optimizer)
    other.load_states(fname)
    assert other.optimizer.lr_scheduler is own
    assert other.learning_rate == trainer.learning_rate == scheduler(SAVED)
