"""An epoch of a RecordIO file can be had again, from its start or from inside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, Dict, List

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd import ElasticTrainer
from gluon_esgd.checkpoint import TrainingState
from gluon_esgd.data import RecordLoader

from ..pool import ROOT, environment, until
from ..training.problems import train_step
from .pictures import write_pictures

READER = partial(
    mx.io.ImageRecordIter,
    shuffle=True,
    data_shape=(3, 8, 8),
    rand_crop=True,
    preprocess_threads=2,
    verbose=False,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twenty-four pictures with labels 0 to 23."""
    path = tmp_path_factory.mktemp("records") / "pictures.rec"
    write_pictures(path, 24)
    return str(path)


def loaders(path: str, parts: int, size: int, **options: Any) -> List[RecordLoader]:
    return [
        RecordLoader(path, READER, batch_size=size, num_parts=parts, part_index=k, **options)
        for k in range(parts)
    ]


def labels(loader: RecordLoader) -> List[int]:
    return [int(label) for _, batch in loader for label in batch.asnumpy()]


@pytest.mark.parametrize("parts, size", [(1, 5), (2, 4), (3, 2), (4, 6)])
def test_an_epoch_shares_all_and_the_next_one_otherwise(path: str, parts: int, size: int) -> None:
    made = loaders(path, parts, size)
    epochs = [[labels(loader) for loader in made] for _ in range(parts + 1)]
    for epoch in epochs:
        assert {len(part) for part in epoch} == {len(made[0]) * size}
        seen = [label for part in epoch for label in part]
        assert set(seen) == set(range(24))
        if 24 % (parts * size) == 0:
            assert len(seen) == 24, "none twice"
    assert len({tuple(epoch[0]) for epoch in epochs}) == parts + 1, "in another order"
    mine = [set(epoch[0]) for epoch in epochs]
    assert mine[0] == mine[parts] and set.union(*mine[:parts]) == set(range(24))


def test_an_epoch_can_be_had_again(path: str) -> None:
    first, again = loaders(path, 1, 4) + loaders(path, 1, 4)
    one, two = list(first), list(first)
    again.set_epoch(1)
    for (x, y), (other_x, other_y) in zip(two, again):
        assert (x.asnumpy() == other_x.asnumpy()).all() and (y.asnumpy() == other_y.asnumpy()).all()
    pictures: List[Dict[int, np.ndarray]] = [
        {int(k): x.asnumpy()[i] for x, y in epoch for i, k in enumerate(y.asnumpy())}
        for epoch in (one, two)
    ]
    assert any((pictures[0][k] != pictures[1][k]).any() for k in range(24)), "crops are others"
    other = loaders(path, 1, 4, seed=1)[0]
    assert labels(other) != [int(k) for _, y in one for k in y.asnumpy()]


def test_a_run_that_ends_inside_an_epoch_goes_on_with_the_rest(path: str, tmp_path: Any) -> None:
    def run(most: int) -> List[int]:
        net, loader = gluon.nn.Dense(1, in_units=192), loaders(path, 1, 4)[0]
        net.initialize()
        trainer = ElasticTrainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
        state = TrainingState(net, trainer, sampler=loader, folder=str(tmp_path), every_steps=1)
        seen: List[int] = []
        for _ in state.epochs(2):
            for x, y in state.batches(loader):
                if len(seen) == 4 * most:
                    return seen
                seen += y.asnumpy().astype(int).tolist()
                train_step(net, trainer, x.asnumpy().reshape(4, -1), y.asnumpy().reshape(4, 1))
        return seen

    loader = loaders(path, 1, 4)[0]
    assert run(8) + run(99) == labels(loader) + labels(loader)


def test_readers_that_are_done_leave_nothing(path: str) -> None:
    loader = loaders(path, 1, 4)[0]
    threads = "/proc/self/task"
    list(loader)
    before = len(os.listdir(threads))
    for _ in range(5):
        list(islice(loader, 2))  # cut, which frees the reader too
    until(lambda: len(os.listdir(threads)) <= before, 20.0)
    assert len(os.listdir(threads)) <= before


def test_too_many_clients_share_as_before(path: str, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(
        "gluon_esgd.data.record_loader.job", lambda: SimpleNamespace(clients_now=lambda: (24, 3))
    )
    loader = RecordLoader(path, READER, batch_size=2)
    assert loader.share_anew() == (24, 3) and loader.shard.num_parts == 1
    assert "client 0 shares as before" in caplog.text and "use a smaller batch" in caplog.text
    caplog.clear()
    with monkeypatch.context() as patch:
        other = SimpleNamespace(rank=1, size=2, is_leader=False)
        patch.setattr("gluon_esgd.data.record_loader.world", lambda: other)
        assert loader.share_anew() == (24, 3) and not caplog.text, "the leader has said so"
    monkeypatch.setattr(
        "gluon_esgd.data.record_loader.job", lambda: SimpleNamespace(clients_now=lambda: (3, 2))
    )
    loader.share_anew()
    assert (loader.shard.num_parts, loader.shard.part_index, len(loader)) == (3, 2, 4)


@pytest.mark.parametrize("part", [0, 1])
def test_a_record_that_cannot_be_read_is_named(path: str, tmp_path: Any, part: int) -> None:
    copy = tmp_path / "copy.rec"
    shutil.copy(f"{path[:-4]}.idx", tmp_path / "copy.idx")
    shutil.copy(path, copy)
    offsets = [int(line.split()[1]) for line in (tmp_path / "copy.idx").read_text().splitlines()]
    number = 12 * part + 5
    with open(copy, "r+b") as file:
        file.seek(offsets[number] + 8 + 24)
        file.write(b"nothing to be seen")
    loader = loaders(str(copy), 2, 4)[part]
    with pytest.raises(
        ValueError, match=f"copy.rec: record {number} at byte {offsets[number]}: no"
    ):
        list(loader)
    loader.set_epoch(1)  # the other part
    assert len(list(loader)) == 3


def test_what_is_no_records_fault_stays_what_it_is(path: str) -> None:
    def fails(**arguments: Any) -> Any:
        reader = READER(**arguments)
        reader.next = lambda: (_ for _ in ()).throw(mx.base.MXNetError("of the engine"))
        return reader

    with pytest.raises(mx.base.MXNetError, match="of the engine"):
        list(RecordLoader(path, fails, batch_size=4))


EPOCHS = """
import os, sys
from functools import partial
from gluon_esgd.data import RecordLoader
from tests.data.test_record_loader import READER

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

wide = partial(READER, data_shape=(3, 128, 128))
loader = RecordLoader(sys.argv[1], wide, batch_size=12, num_parts=1, part_index=0)
for epoch in range(25):
    for data, _ in loader:
        data.wait_to_read()
    if epoch == 4:
        before = resident()
print(resident() - before)
"""


def test_epochs_take_no_memory(path: str) -> None:
    """Readers with MXNet's own prefetch_buffer would leave 140 MB here.

    In a process of its own, as what earlier tests have freed comes and goes.
    """
    grown = subprocess.run(
        [sys.executable, "-c", EPOCHS, path],
        stdout=subprocess.PIPE,
        timeout=100,
        cwd=ROOT,
        env=environment(),
        check=True,
    ).stdout
    assert int(grown) < 50e6
