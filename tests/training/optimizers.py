"""Every optimizer there is, and a problem that each can train, in float16 on the CPU too."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import gluon_esgd.optim  # noqa: F401 (registers 'elasticsgd')

STEPS, SAMPLES = 20, 12
SHAPES = [(4, 3), (2, 5)]  # two dimensions: 'groupadagrad' takes no others

# Settings for name; where one has several forms, a form after a colon.
SETTINGS: Dict[str, Dict[str, Any]] = {
    "adadelta": {"rho": 0.5, "epsilon": 1e-2},
    "adagrad": {"learning_rate": 0.3, "wd": 1e-3},
    "adam": {"learning_rate": 0.05, "clip_gradient": 0.5},
    "adamax": {"learning_rate": 0.05},
    "ccsgd": {"learning_rate": 0.1},
    "dcasgd": {"learning_rate": 0.1, "lamda": 0.04},
    "elasticsgd": {"learning_rate": 0.1, "momentum": 0.5},
    "elasticsgd:nesterov": {"learning_rate": 0.1, "momentum": 0.5, "nesterov": True},
    "ftml": {"learning_rate": 0.05},
    "ftrl": {"learning_rate": 0.3},
    "groupadagrad": {"learning_rate": 0.3},
    "lamb": {"learning_rate": 0.05},
    "lars": {"learning_rate": 0.5, "momentum": 0.5, "eta": 0.1, "wd": 1e-3},
    "lbsgd": {"learning_rate": 0.1, "momentum": 0.5},
    "lbsgd:cumulative": {"learning_rate": 0.1, "batch_scale": 2},
    "nadam": {"learning_rate": 0.05},
    "nag": {"learning_rate": 0.1, "momentum": 0.5, "wd": 1e-3},
    "rmsprop": {"learning_rate": 0.05},
    "rmsprop:centered": {"learning_rate": 0.05, "centered": True},
    "sgd": {"learning_rate": 0.1, "momentum": 0.5, "wd": 1e-3},
    "sgd:plain": {"learning_rate": 0.1},
    "sgld": {"learning_rate": 0.01},
    "signum": {"learning_rate": 0.05},
    "test": {"rescale_grad": -0.1},  # it adds gradients
}
SCHEDULED = ("lars", "nadam", "sgd")  # with a schedule of their own in `make`


def registered() -> List[str]:
    """Names of MXNet's own optimizers and ours; tests may have registered others."""
    kinds = mx.optimizer.Optimizer.opt_registry.items()
    ours = ("mxnet.", "gluon_esgd.")
    return sorted(name for name, kind in kinds if kind.__module__.startswith(ours))


def make(form: str, **more: Any) -> mx.optimizer.Optimizer:
    """A new optimizer of a form in `SETTINGS`."""
    settings = {**SETTINGS[form], **more}
    if form in SCHEDULED:
        rate = settings["learning_rate"]
        settings["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(3, 0.8, base_lr=rate)
    return mx.optimizer.create(form.split(":")[0], **settings)


def parameters(
    dtype: str = "float32", contexts: Optional[List[mx.Context]] = None, seed: int = 0
) -> List[gluon.Parameter]:
    """Initialized parameters whose values depend on `seed` alone."""
    random = np.random.RandomState(seed)
    made = []
    for i, shape in enumerate(SHAPES):
        value = mx.nd.array(2 * random.randn(*shape))
        param = gluon.Parameter(f"p{i}_weight", shape=shape, dtype=dtype)
        param.initialize(mx.init.Constant(value), ctx=contexts)
        made.append(param)
    return made


def targets(step: int) -> List[np.ndarray]:
    """For each parameter what the samples of a step draw it to, samples first."""
    random = np.random.RandomState(1000 + step)
    return [0.3 + 0.2 * random.randn(SAMPLES, *shape) for shape in SHAPES]


def backward(params: Sequence[gluon.Parameter], step: int, first: int, last: int) -> None:
    """Make the gradients of half the squared distance to the targets first:last, over devices."""
    devices = len(params[0].list_ctx())
    cuts = [first + (last - first) * k // devices for k in range(devices + 1)]
    for param, target in zip(params, targets(step)):
        for data, low, high in zip(param.list_data(), cuts, cuts[1:]):
            sums = mx.nd.array(target[low:high].sum(0), dtype=data.dtype, ctx=data.context)
            with autograd.record():
                # `half a square` by elementwise products: Dense has no float16 on the CPU.
                loss = (data * data * ((high - low) / 2) - data * sums).sum()
            loss.backward()


def weights(params: Sequence[gluon.Parameter], device: int = 0) -> np.ndarray:
    """All weights on one device, flat, in float32."""
    arrays = [p.list_data()[device].asnumpy().astype(np.float32).ravel() for p in params]
    return np.concatenate(arrays)


def distance(flat: np.ndarray) -> float:
    """From the middle of all targets."""
    return float(np.linalg.norm(flat - 0.3) / math.sqrt(flat.size))


def digest(params: Sequence[gluon.Parameter]) -> str:
    """Of the weights on all devices of this rank, which must be the same."""
    devices = [weights(params, k).tobytes() for k in range(len(params[0].list_ctx()))]
    assert len(set(devices)) == 1, "the devices of a rank have parted"
    return hashlib.sha256(devices[0]).hexdigest()


def train_alone(
    trainer_class: type,
    form: str,
    dtype: str = "float32",
    contexts: Optional[List[mx.Context]] = None,
    **settings: Any,
) -> Tuple[np.ndarray, ...]:
    """What one process makes of all samples: the weights on each device."""
    mx.random.seed(7)  # 'sgld' draws
    params = parameters(dtype, contexts)
    trainer = trainer_class(params, make(form, **settings))
    for step in range(STEPS):
        backward(params, step, 0, SAMPLES)
        trainer.step(SAMPLES)
    return tuple(weights(params, k) for k in range(len(params[0].list_ctx())))
