"""Which pictures ranks see, also of a job that is killed inside an epoch and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List

import mxnet as mx
import pytest
from mxnet import gluon

from gluon_esgd.vision import input_rate, open_pictures

from ..data.pictures import write_pictures
from ..pool import ROOT, environment, mpiexec

EPOCHS, BATCHES, SIZE, RANKS = 3, 5, 4, 2


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many pictures as two ranks take in five batches of four, each with a label of its own."""
    folder = tmp_path_factory.mktemp("records")
    write_pictures(folder / "train.rec", RANKS * BATCHES * SIZE)
    write_pictures(folder / "val.rec", 7)
    return folder


def trains(records: str, output: str, kill_at: str) -> None:
    """Note each batch before its step; SIGKILL before the one at `kill_at`, unless it is empty."""
    from gluon_esgd import ElasticTrainer, world
    from gluon_esgd.checkpoint import TrainingState

    pictures, me = open_pictures(records, batch_size=SIZE, image_size=8), world()
    net = gluon.nn.Dense(1, in_units=3 * 8 * 8)
    net.initialize()
    trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    state = TrainingState(
        net, trainer, sampler=pictures.sampler, folder=output, every_steps=2, background=True
    )
    with open(os.path.join(output, f"rank{me.rank}.jsonl"), "a") as seen:
        for epoch in state.epochs(EPOCHS):
            for data, label in state.batches(pictures.train):
                place = epoch * BATCHES + state.batch
                labels = label.asnumpy().astype(int).tolist()
                seen.write(json.dumps([place, labels, float(data.sum().asscalar())]) + "\n")
                seen.flush()
                if kill_at and place == int(kill_at) and me.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                with mx.autograd.record():
                    loss = net(data.reshape((SIZE, -1)))
                loss.backward()
                trainer.step(SIZE)


def job(records: Path, output: Path, kill_at: str = "") -> int:
    output.mkdir(exist_ok=True)
    call = "from tests.vision.test_sources import trains; import sys; trains(*sys.argv[1:])"
    argv = [*mpiexec(sys.executable), "-n", RANKS, sys.executable, "-c", call]
    argv += [records, output, kill_at]
    ended = subprocess.run(
        list(map(str, argv)), env=environment(), cwd=ROOT, timeout=100, capture_output=True
    )
    return ended.returncode


def seen(output: Path) -> List[Dict[int, List[Any]]]:
    """What each rank saw at each place; what came last counts, and is what was there before."""
    ranks = []
    for rank in range(RANKS):
        places: Dict[int, List[Any]] = {}
        for line in (output / f"rank{rank}.jsonl").read_text().splitlines():
            place, *what = json.loads(line)
            assert places.setdefault(place, what) == what, "a batch that is done again is the same"
        ranks.append(places)
    return ranks


@pytest.mark.mpi
def test_a_job_that_is_killed_goes_on_with_the_right_pictures(
    records: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert job(records, whole) == 0
    assert job(records, killed, kill_at=str(BATCHES + 3)) != 0
    assert max(seen(killed)[1]) == BATCHES + 3
    assert job(records, killed) == 0
    assert seen(killed) == seen(whole)
    lines = (killed / "rank0.jsonl").read_text().splitlines()
    assert len(lines) < EPOCHS * BATCHES + 4, "it did not begin anew"
    for epoch in range(EPOCHS):
        places = range(epoch * BATCHES, (epoch + 1) * BATCHES)
        counts = Counter(k for rank in seen(killed) for place in places for k in rank[place][0])
        assert counts == dict.fromkeys(range(RANKS * BATCHES * SIZE), 1)


def test_each_picture_is_validated_once(records: Path) -> None:
    pictures = open_pictures(str(records), batch_size=SIZE, image_size=8)
    for _ in range(2):
        assert [int(k) for _, y in pictures.validation() for k in y.asnumpy()] == list(range(7))
    assert pictures.validation_count == 7 and pictures.num_classes == 1000


def test_the_rate_of_input_leaves_the_epoch_as_it_was(records: Path) -> None:
    pictures = open_pictures(str(records), batch_size=SIZE, image_size=8)
    assert input_rate(pictures) > 0
    assert pictures.sampler.epoch == 0


def test_noise_has_the_form_of_pictures() -> None:
    pictures = open_pictures(batch_size=2, image_size=8, synthetic=(9, 5))
    batches = list(pictures.train)
    assert len(batches) == len(pictures.train) == 4 and pictures.train_count == 8
    assert batches[0][0].shape == (2, *pictures.shape) and batches[0][1].asnumpy().max() < 5


def test_samples_are_of_mean_zero_and_deviation_one(records: Path) -> None:
    (data, _), *_ = open_pictures(str(records), batch_size=32, image_size=8).train
    values = data.asnumpy()
    assert abs(values.mean()) < 0.5 and 0.7 < values.std() < 1.5
