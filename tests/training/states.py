"""Trainers whose states tests save and load, alone and on the ranks of a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer, world
from gluon_esgd.states.values import plain

from ..pool import Shape
from .problems import BATCH, batches, flat, network, shares, train_step

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
    return world().settings.num_servers > 0 or world().num_clients > 1


def make(case: str, net: Any, rate: float = 0.1, **kwargs: Any) -> Any:
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
    trainer.save_states(os.path.join(folder, "states"))
    if world().is_leader:
        net.save_parameters(os.path.join(folder, f"net{world().client}"))
    world().barrier()


def load(net: Any, trainer: Any, folder: str, client: Optional[int] = None) -> None:
    net.load_parameters(os.path.join(folder, f"net{world().client if client is None else client}"))
    trainer.load_states(os.path.join(folder, "states"))


def momentum(trainer: Any, device: int = 0) -> bytes:
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


def uninterrupted(folder: str, case: str, lazy: int) -> Tuple[bytes, bytes, bytes]:
    net = network()
    trainer = make(case, net, lazy=lazy)
    train(net, trainer, 0, SAVED)
    save(net, trainer, folder)
    train(net, trainer, SAVED, STEPS)
    return flat(net).tobytes(), seen_center(net, trainer), momentum(trainer)


def resume(folder: str, case: str, lazy: int, again: bool = False) -> Tuple[bytes, bytes, bytes]:
    net = network(seed=8)
    trainer = make(case, net, 0.1 if case == "schedule" else 0.9, lazy=lazy)
    load(net, trainer, folder)
    if again:  # saved before a step, it is the same file
        trainer.save_states(os.path.join(folder, "states"))
        trainer.load_states(os.path.join(folder, "states"))
    train(net, trainer, SAVED, STEPS)
    return flat(net).tobytes(), seen_center(net, trainer), momentum(trainer)


BACK = [
    pytest.param(Shape(2), marks=pytest.mark.mpi, id="mpi"),
    pytest.param(Shape(2, 1, 1, "esgd"), marks=pytest.mark.servers, id="esgd"),
    pytest.param(Shape(2, 1, 1, "asgd"), marks=pytest.mark.servers, id="asgd"),
    pytest.param(Shape(4, 2, 0, "esgd"), marks=pytest.mark.mpi, id="split"),
    pytest.param(Shape(4, 2, 1, "sgd"), marks=pytest.mark.servers, id="sgd"),
]


SPECIAL: Dict[str, Dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "lars": {"momentum": 0.9},
    "signum": {"momentum": 0.9},
    "lbsgd": {"momentum": 0.9, "batch_scale": 2},
    "rmsprop": {"centered": True},
    "test": {},
}


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


def make_plain(
    kind: type, name: str, params: List[gluon.Parameter], rate: float, **kwargs: Any
) -> Any:
    settings = dict(SPECIAL.get(name, {}), learning_rate=rate)
    if params[0].dtype == "float16" or params[0].dtype is np.float16:
        settings["multi_precision"] = True
    return kind(params, name, settings, **kwargs)


def values(params: List[gluon.Parameter]) -> bytes:
    return b"".join(d.asnumpy().tobytes() for p in params for d in p.list_data())


def copy_data(source: List[gluon.Parameter], to: List[gluon.Parameter]) -> None:
    for one, other in zip(source, to):
        other.set_data(one.data())


def saved(tmp_path: Path, name: str = "sgd", **settings: Any) -> Tuple[Any, Any, str]:
    net = network()
    trainer = gluon.Trainer(net.collect_params(), name, {"learning_rate": 0.1, **settings})
    x, y = batches()
    for i in range(SAVED):
        train_step(net, trainer, x[i], y[i])
    fname = str(tmp_path / "states")
    trainer.save_states(fname)
    return net, trainer, fname


def loaded(fname: str, net: Any, kind: type = ElasticTrainer, **settings: Any) -> Any:
    again = network(seed=4)
    for one, other in zip(net.collect_params().values(), again.collect_params().values()):
        other.set_data(one.data())
    trainer = kind(again.collect_params(), "sgd", {"learning_rate": 0.7, **settings})
    trainer.load_states(fname)
    return again, trainer


class OwnSchedule(mx.lr_scheduler.LRScheduler):
    def __call__(self, num_update: int) -> float:
        return self.base_lr / (1 + num_update)


def doubled(num_update: int) -> float:
    return 0.1 * 2**num_update
