"""Damaged, foreign and evil states files are refused by name, and none of their code is run."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any, Callable, List, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer
from gluon_esgd.states import States, check, collect, decode, encode

from .problems import network
from .states import (
    saved,
)


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
    net, trainer, fname = saved(tmp_path, momentum=0.9)
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
