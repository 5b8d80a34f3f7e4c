"""One process: `ElasticTrainer` is ``gluon.Trainer`` to the bit, and loads no MPI."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Dict

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer

from .problems import batches, flat, network, train_step

OPTIMIZERS: Dict[str, Dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4, "clip_gradient": 0.1},
    "adam": {"learning_rate": 0.01},
    "elasticsgd": {"learning_rate": 0.1, "momentum": 0.9, "interval": 8},
    "ftrl": {"learning_rate": 0.1},
}


def _train(trainer_class: type, name: str, deferred: bool, **kwargs: Any) -> np.ndarray:
    net = network(deferred=deferred)
    trainer = trainer_class(net.collect_params(), name, dict(OPTIMIZERS[name]), **kwargs)
    for step, (x, y) in enumerate(zip(*batches(10))):
        if step == 5:
            trainer.set_learning_rate(trainer.learning_rate / 2)
        train_step(net, trainer, x[: 24 - step], y[: 24 - step])
    return flat(net)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits_as_gluon(name: str, deferred: bool) -> None:
    np.testing.assert_array_equal(
        _train(ElasticTrainer, name, deferred), _train(gluon.Trainer, name, deferred)
    )


def test_scripts_for_the_stock_parameter_server_run_alone() -> None:
    expected = _train(gluon.Trainer, "sgd", False)
    for kvstore in ("dist_sync", "dist_device_sync", "dist_async", "local", None):
        ours = _train(ElasticTrainer, "sgd", False, kvstore=kvstore)
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
    ours = _train(ElasticTrainer, "sgd", False, kvstore="dist_async", update_on_kvstore=True)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_center_and_finish_are_there_and_do_nothing() -> None:
    net = network()
    trainer = ElasticTrainer(net.collect_params(), "sgd")
    before = flat(net)
    with trainer.center():
        np.testing.assert_array_equal(flat(net), before)
    trainer.finish()
    trainer.reset_center()
    assert (trainer.rule, trainer.interval) == ("sgd", 1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rule": "easgd"}, "rule='easgd' must be one of sgd, asgd, esgd"),
        ({"interval": 0}, "interval=0 must be an integer of at least 1"),
        ({"alpha": 0.1, "beta": 0.2}, "alpha=0.1 or beta=0.2, not both"),
        ({"alpha": 1.5}, "alpha=1.5 must lie between 0 and"),
        ({"lazy": -1}, "lazy=-1 must be an integer of at least 0"),
        ({"interval": 1, "lazy": 2}, "lazy=2 must not be above interval=1"),
    ],
)
def test_bad_arguments_are_errors_alone_too(kwargs: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticTrainer(network().collect_params(), "sgd", **kwargs)


def test_esgd_without_a_center_warns_once_and_is_sgd(caplog: pytest.LogCaptureFixture) -> None:
    trainer = ElasticTrainer(network().collect_params(), "sgd", rule="esgd")
    assert trainer.rule == "sgd"
    assert ["has no center" in r.message for r in caplog.records] == [True]


IMPORT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {refused}:
            raise ImportError(name + ' is refused here')
sys.meta_path.insert(0, Refuse())
{code}
"""


def _python(code: str, refused: tuple) -> str:
    source = IMPORT.format(refused=refused, code=code)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_starts_and_loads_nothing() -> None:
    code = (
        "import threading, gluon_esgd, os\n"
        "print(len(threading.enumerate()), sorted(m for m in sys.modules if m in "
        "('mxnet', 'mpi4py', 'cupy', 'numpy')), gluon_esgd.__version__ > '', "
        "'ElasticTrainer' in dir(gluon_esgd))"
    )
    assert _python(code, ("mpi4py", "cupy", "mxnet")) == "1 [] True True\n"


def test_what_leaders_need_of_the_center_loads_no_mxnet() -> None:
    modules = ", ".join(f"gluon_esgd.center.{name}" for name in ("link", "zygote", "station"))
    code = f"import {modules}; print('mxnet' in sys.modules)"
    assert _python(code, ("mpi4py", "cupy", "mxnet")) == "False\n"


def test_training_alone_loads_no_mpi() -> None:
    code = (
        "from tests.training.test_alone import _train, ElasticTrainer\n"
        "print(_train(ElasticTrainer, 'sgd', False).shape, 'mpi4py' in sys.modules)"
    )
    assert _python(code, ("mpi4py", "cupy")) == "(163,) False\n"


def test_several_devices() -> None:
    def train(trainer_class: type) -> np.ndarray:
        contexts = [mx.cpu(0), mx.cpu(1)]
        net = network(ctx=contexts)
        trainer = trainer_class(net.collect_params(), "sgd", {"learning_rate": 0.1})
        loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
        for x, y in zip(*batches(5)):
            parts = gluon.utils.split_and_load(mx.nd.array(x), contexts)
            labels = gluon.utils.split_and_load(mx.nd.array(y), contexts)
            with mx.autograd.record():
                losses = [loss_of(net(a), b) for a, b in zip(parts, labels)]
            for loss in losses:
                loss.backward()
            trainer.step(len(x))
        params = net.collect_params().values()
        return np.concatenate([p.data(contexts[1]).asnumpy().ravel() for p in params])

    np.testing.assert_array_equal(train(ElasticTrainer), train(gluon.Trainer))
