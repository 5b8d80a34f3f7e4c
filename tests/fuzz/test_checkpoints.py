"""Checkpoints: loaded into a network and a trainer, which then make a step."""

from __future__ import annotations

import io
import json
import logging
import zipfile

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from gluon_esgd import ElasticTrainer

from .mutation import Cases, bytes_, json_text, nothing_runs, seeds
from .test_states_files import archive

checkpoint = pytest.importorskip("gluon_esgd.checkpoint")

NAME = "checkpoint-000001-epoch1-batch2.npz"


def training(folder):
    net = gluon.nn.HybridSequential(prefix="")
    net.add(gluon.nn.Dense(3, in_units=4), gluon.nn.BatchNorm(in_channels=3))
    net.initialize(mx.init.One())
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    return net, trainer, checkpoint.TrainingState(net, trainer, folder=str(folder))


def step(net, trainer):
    with autograd.record():
        loss = net(mx.nd.ones((2, 4))).sum()
    loss.backward()
    trainer.step(2)
    mx.nd.waitall()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    net, trainer, state = training(tmp_path_factory.mktemp("checkpoint"))
    step(net, trainer)
    with open(state.save(), "rb") as file:
        return file.read()


@pytest.fixture
def loads(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    path = tmp_path / NAME

    def load(data):
        path.write_bytes(data)
        net, trainer, state = training(tmp_path)
        with nothing_runs():
            state.load(str(path))
        step(net, trainer)

    return load


def test_a_good_one_loads(good, loads):
    loads(good)


def test_any_change_of_bytes_is_refused_or_harmless(good, loads):
    cases = Cases()
    for seed, random in seeds(0, 200):
        data = bytes_(random, good, good)
        cases.ends_well(seed, data, lambda d=data: loads(d), [NAME])
    assert cases.count == 200 and cases.refused > 100


def test_any_tree_in_a_whole_archive_is_refused_or_harmless(good, loads):
    arrays = dict(np.load(io.BytesIO(good)))
    tree = json.loads(str(arrays.pop("json")))
    cases = Cases()
    for seed, random in seeds(1000, 300):
        text = json_text(random, tree)
        cases.ends_well(seed, text, lambda t=text: loads(archive(np.array(t), arrays)), [NAME])
    assert cases.count == 300 and cases.refused > 100


def test_a_bomb_is_not_unpacked(loads):
    data = archive(np.array("{}"), {"array0": np.zeros(1 << 27, np.int8)}, zipfile.ZIP_DEFLATED)
    error = Cases().ends_well(0, "bomb", lambda: loads(data), [NAME])
    assert error is not None and "claim" in str(error)
