"""One process: every optimizer gives the bits that it gives under ``gluon.Trainer``."""

from __future__ import annotations

from typing import Any, Dict

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer

from .optimizers import SETTINGS, distance, parameters, registered, train_alone, weights

ONE, TWO = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]
TYPES = {
    "float32": {},
    "float16": {"multi_precision": True},
}


def test_no_optimizer_is_left_out() -> None:
    assert sorted({form.split(":")[0] for form in SETTINGS}) == registered()


@pytest.mark.parametrize("contexts", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", SETTINGS)
def test_same_bits_as_gluon(form: str, dtype: str, contexts: list) -> None:
    ours = train_alone(ElasticTrainer, form, dtype, contexts, **TYPES[dtype])
    gluons = train_alone(gluon.Trainer, form, dtype, contexts, **TYPES[dtype])
    np.testing.assert_array_equal(ours, gluons)
    assert distance(ours[0]) < distance(weights(parameters(dtype)))


# What MXNet itself cannot do: states in float32 beside float16 weights, a momentum that it asks
# whether it is true.
FAILING = [
    *[(form, "float16", {}) for form in ("adadelta", "adagrad", "ftrl", "rmsprop")],
    ("groupadagrad", "float16", {}),
    ("groupadagrad", "float32", {"wd": 0.1}),
    ("dcasgd", "float32", {"momentum": 0.5}),
]


@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize(("form", "dtype", "settings"), FAILING)
def test_what_fails_fails_as_in_gluon(form: str, dtype: str, settings: Dict[str, Any]) -> None:
    said = []
    for trainer_class in (ElasticTrainer, gluon.Trainer):
        with pytest.raises(Exception) as error:
            train_alone(trainer_class, form, dtype, ONE, **settings)
        said.append((error.type, str(error.value)))
    assert said[0] == said[1]
