"""States files, ours and Gluon's: loaded into a trainer, which then makes a step."""

from __future__ import annotations

import io
import json
import logging
import pickle
import struct
import zipfile

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer
from gluon_esgd.states import Position, collect, decode, encode

from .mutation import Cases, bytes_, json_text, nothing_runs, seeds

SCHEDULER = {"step": 5, "factor": 0.5, "base_lr": 0.1}


def trainer_and_params(kind=ElasticTrainer):
    params = [gluon.Parameter(f"p{i}_weight", shape=(3, 4)) for i in range(2)]
    for param in params:
        param.initialize(mx.init.One())
    schedule = mx.lr_scheduler.FactorScheduler(**SCHEDULER)
    settings = {"learning_rate": 0.1, "momentum": 0.9, "lr_scheduler": schedule}
    trainer = kind(params, "sgd", settings)
    step(trainer, params)
    return trainer, params


def step(trainer, params):
    for param in params:
        param.grad()[:] = 0.5
        param.data()._fresh_grad = True
    trainer.step(1)
    for param in params:
        param.data().wait_to_read()


@pytest.fixture(scope="module")
def ours():
    trainer, params = trainer_and_params()
    states = collect(trainer._optimizer, trainer._updaters[0])
    states.shapes = [list(param.shape) for param in params]
    states.scaler = {"_loss_scale": 8.0, "_next_loss_scale": 8.0, "_unskipped": 0}
    states.position = Position(step=5, last_due=4)
    return encode(states)


@pytest.fixture(scope="module")
def gluons(tmp_path_factory):
    trainer, _ = trainer_and_params(gluon.Trainer)
    path = tmp_path_factory.mktemp("gluon") / "states"
    trainer.save_states(str(path))
    return path.read_bytes()


@pytest.fixture
def loads(tmp_path, caplog):
    """Load bytes as a file and go on training, as a script would."""
    path = tmp_path / "net.states"
    caplog.set_level(logging.CRITICAL)

    def load(data):
        path.write_bytes(data)
        trainer, params = trainer_and_params()
        with nothing_runs():
            trainer.load_states(str(path))
        step(trainer, params)

    return load


def test_good_files_load(ours, gluons, loads):
    loads(ours)
    loads(gluons)


def test_any_change_of_bytes_is_refused_or_harmless(ours, gluons, loads):
    cases = Cases()
    for seed, random in seeds(0, 300):
        good, other = (ours, gluons) if seed % 2 else (gluons, ours)
        data = bytes_(random, good, other)
        cases.ends_well(seed, data, lambda d=data: loads(d), ["net.states"])
    assert cases.count == 300 and cases.refused > 150


def test_any_tree_in_a_whole_archive_is_refused_or_harmless(ours, loads):
    arrays = dict(np.load(io.BytesIO(ours)))
    tree = json.loads(str(arrays.pop("json")))
    cases = Cases()
    for seed, random in seeds(1000, 300):
        text = json_text(random, tree)
        data = archive(np.array(text), arrays)
        cases.ends_well(seed, text, lambda d=data: loads(d), ["net.states"])
    assert cases.count == 300 and cases.refused > 100


@pytest.mark.parametrize(
    "attributes",
    [
        {"lr": "fast"}, {"momentum": [0.9]}, {"num_update": {}}, {"update": 5}, {"lr": ()},
        {"create_state_multi_precision": 1}, {"_all_index_update_counts": 5}, {"idx2name": "abc"},
        {"_all_index_update_counts": {0: {0: "many"}}}, {"_all_index_update_counts": {0: [1]}},
    ],
)  # fmt: skip
def test_attributes_that_no_optimizer_has_are_named(attributes, ours, loads):
    states = decode(ours, "good")
    states.attributes.update(attributes)
    (key,) = attributes
    assert Cases().ends_well(0, attributes, lambda: loads(encode(states)), [f"{key!r}", "counts"])


def archive(text, arrays, compression=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as packed:
        for name, array in {"json": text, **arrays}.items():
            entry = io.BytesIO()
            np.lib.format.write_array(entry, np.asarray(array), allow_pickle=True)
            packed.writestr(f"{name}.npy", entry.getvalue())
    return out.getvalue()


def header(shape, descr="<f4"):
    """An entry whose header promises more than there is."""
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 64


@pytest.mark.parametrize(
    "entry",
    [
        header((2**60,)), header((2**31, 2**31, 2**31)), header((-1,)), header((2**34,), "<U99"),
        header((3,), "|O"), header("(" * 5000), header((1,) * 40), b"\x93NUMPY\x09\x00",
    ],
    ids=range(8),
)  # fmt: skip
def test_what_headers_promise_is_not_believed(entry, ours, loads):
    out = io.BytesIO(ours)
    with zipfile.ZipFile(out, "a") as packed:
        packed.writestr("array99.npy", entry)
    cases = Cases()
    assert cases.ends_well(0, entry, lambda: loads(out.getvalue()), ["net.states"])


def test_a_bomb_is_not_unpacked(loads):
    data = archive(np.array("{}"), {"array0": np.zeros(1 << 27, np.int8)}, zipfile.ZIP_DEFLATED)
    assert len(data) < 1 << 20
    error = Cases().ends_well(0, "bomb", lambda: loads(data), ["net.states"])
    assert error is not None and "claim" in str(error)


class Runs:
    """Unpickled it would start a program."""

    def __reduce__(self):
        import os

        return os.system, ("touch /tmp/gluon-esgd-was-run",)


def _pickles():
    numbers = [struct.pack("<I", i) for i in range(60)]
    pairs = b")" + b"".join(b"r%sj%s\x86" % (i, i) for i in numbers)
    laughs = b"](K\x01K\x01e" + b"".join(b"r%s0](j%sj%se" % ((i,) * 3) for i in numbers)
    return {
        "runs": pickle.dumps(({0: Runs()}, Runs())),
        "runs when built": pickle.dumps({0: [Runs()] * 3}, protocol=2),
        "memo place": b"\x80\x02]r\xff\xff\xff\x7f.",
        "bytes of 2^60": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.",
        "bytearray of 2^40": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",
        "text of 2^60": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
        "frame of 2^60": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"].",
        "tuples in one another as a key": b"\x80\x02}(" + b")" + b"\x85" * 200_000 + b"K\x01u.",
        "a tuple twice, 60 times, as a key": b"\x80\x02}(" + pairs + b"K\x01u.",
        "lists in one another": b"\x80\x02}K\x00" + b"]" * 50_000 + b"a" * 49_999 + b"s.",
        "a list twice, 60 times": b"\x80\x02}K\x00" + laughs + b"s.",
        "a list in itself": b"\x80\x02}K\x00]q\x00h\x00as.",
        "persistent": b"Pfile\n.",
        "extension": b"\x80\x02\x82\x01.",
        "nothing to pop": b"\x80\x020.",
        "no mark": b"\x80\x02t.",
        "odd items": b"\x80\x02}(K\x01u.",
        "calls a number": b"\x80\x02K\x01)R.",
        "builds a number": b"\x80\x02K\x01}b.",
        "digits": b"I" + b"9" * 6000 + b"\n.",
        "long digits": b"L" + b"9" * 6000 + b"L\n.",
        "no text": b"\x80\x02X\x04\0\0\0\xff\xff\xff\xff.",
    }  # fmt: skip


@pytest.mark.parametrize("data", _pickles().values(), ids=_pickles())
def test_pickles_with_bad_intentions(data, loads):
    assert Cases().ends_well(0, data, lambda: loads(data), ["net.states"])


def test_any_protocol_of_pickle_changed_anywhere(gluons, loads):
    """Of the states alone, so that more changes hit what is looked at."""
    good = pickle.loads(gluons)[0]
    cases = Cases()
    for seed, random in seeds(2000, 200):
        data = bytes_(random, pickle.dumps(good, protocol=seed % 6), gluons)
        cases.ends_well(seed, data, lambda d=data: loads(d), ["net.states"])
    assert cases.count == 200 and cases.refused > 60
