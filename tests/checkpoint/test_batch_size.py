"""Inside an epoch a run goes on after the samples that were done, whatever the batch size."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, List

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd.checkpoint.rest import batch_size_of, rest_of
from gluon_esgd.data import RecordLoader

from ..data.pictures import write_pictures
from ..pool import Pools, Shape
from ..training.problems import train_step
from .loops import make, run

TWO = pytest.mark.parametrize("shape", [pytest.param(Shape(2), marks=pytest.mark.mpi)])
SPLIT = pytest.mark.parametrize("shape", [pytest.param(Shape(4, 2, 0), marks=pytest.mark.mpi)])


def seen(folder: str, most: int = 99, **settings: Any) -> List[Any]:
    """What is trained on, batch by batch, until `most` batches are done."""
    net, trainer, state, loader = make(folder, every_steps=1, **settings)
    found: List[Any] = []
    for _ in state.epochs(1):
        for x, y in state.batches(loader):
            if len(found) == most:
                return found
            found.append(x.asnumpy())
            train_step(net, trainer, x.asnumpy(), y.asnumpy())
        assert len(loader) == state.batch
    return found


@pytest.mark.parametrize("size", [2, 8, 16])
def test_a_size_that_divides_goes_on_after_the_same_samples(
    size: int, tmp_path: Any, caplog: Any
) -> None:
    whole = np.concatenate(seen(str(tmp_path / "whole")))
    before = seen(str(tmp_path / "cut"), most=4)
    after = seen(str(tmp_path / "cut"), batch=size)
    assert {len(x) for x in after} == {size}
    assert (np.concatenate(before + after) == whole).all()
    assert f"after batch {16 // size} of {size} samples, which were 4 of 4" in caplog.text


def test_any_other_is_refused_and_the_old_one_goes_on(tmp_path: Any) -> None:
    before = seen(str(tmp_path), most=5)
    text = (
        r"batch_size=8: epoch 0 was left after 5 batches of 4, and these 20 samples are no whole "
        r"number of batches of 8: .*\. End this epoch with batch_size=4, or .* divides 20;"
    )
    with pytest.raises(ValueError, match=text):
        seen(str(tmp_path), batch=8)
    after = seen(str(tmp_path))
    assert len(before + after) == 12
    assert run(str(tmp_path), batch=7) is not None, "the next epoch takes any"


def other_size(folder: str, rank: int, most: int = 99) -> str:
    """A loop in which this worker rank has another batch size than before."""
    from gluon_esgd import world

    size = 3 if world().worker_rank == rank else 4
    with pytest.raises(ValueError) as error:
        seen(folder, most, batch=size)
    return str(error.value)


@TWO
def test_all_ranks_of_the_client_are_told(pools: Pools, shape: Shape, tmp_path: Any) -> None:
    pool = pools.get(shape)
    pool.run(seen, str(tmp_path), 2)
    said = pool.run(other_size, str(tmp_path), 1)
    assert all(text.startswith("rank 1: batch_size=3: epoch 0 was left after") for text in said)
    assert [len(found) for found in pool.run(seen, str(tmp_path))] == [4, 4]


@SPLIT
def test_all_clients_of_a_split_job_are_told(pools: Pools, shape: Shape, tmp_path: Any) -> None:
    pool = pools.get(shape)
    pool.run(seen, str(tmp_path), 2)
    said = pool.run(other_size, str(tmp_path), 3)
    assert [text.partition("batch_size=3")[0] for text in said] == [
        *["client 1: rank 1: "] * 2, *["rank 1: "] * 2
    ]  # fmt: skip


def test_records_come_in_the_same_order_for_any(tmp_path: Any) -> None:
    path = tmp_path / "pictures.rec"
    write_pictures(path, 24)
    reader = partial(mx.io.ImageRecordIter, shuffle=True, data_shape=(3, 8, 8), verbose=False)

    def labels(size: int, done: int = 0) -> List[int]:
        loader = RecordLoader(path, reader, batch_size=size)
        assert batch_size_of(loader) == size
        return [int(label) for _, y in rest_of(loader, done) for label in y.asnumpy()]

    assert labels(4)[16:] == labels(8, done=2) == labels(2, done=8)


def test_what_loaders_say() -> None:
    data = gluon.data.ArrayDataset(mx.nd.zeros((12, 1)))
    loader = gluon.data.DataLoader(data, 4)
    assert batch_size_of(loader) == 4
    list(rest_of(loader, 1))
    assert batch_size_of(loader) == 4, "also after its first batches were left out"
    assert batch_size_of(mx.io.NDArrayIter(mx.nd.zeros((12, 1)), batch_size=3)) == 3
    assert batch_size_of(map(tuple, loader)) is None
    assert batch_size_of(SimpleNamespace(batch_size="all")) is None
    by_length = gluon.data.DataLoader(data, batch_sampler=[[0], [1, 2, 3]])
    assert batch_size_of(by_length) is None
