"""Parts of a RecordIO file differ in length; the batches of workers do not."""

from collections import Counter

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd.data import EqualBatches, RecordShard, ShardSampler, record_shard

from ..pool import Shape, label
from .pictures import write_pictures


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """Ten pictures with labels 0 to 9."""
    path = tmp_path_factory.mktemp("ten") / "ten.rec"
    write_pictures(path, 10)
    return path


def shards(path, parts, **kwargs):
    return [record_shard(path, num_parts=parts, part_index=k, **kwargs) for k in range(parts)]


def read(shard, **options):
    return mx.io.ImageRecordIter(
        **shard.arguments, data_shape=(3, 8, 8), preprocess_threads=1, verbose=False, **options
    )


def labels(batches):
    return [batch.label[0].asnumpy().astype(int).tolist() for batch in batches]


def epochs(shard, number, **options):
    batches, out = EqualBatches(read(shard, **options), shard.batches_per_epoch), []
    for _ in range(number):
        batches.reset()
        out.append(labels(batches))
        assert len(out[-1]) == len(batches)
    return out


CUTS = pytest.mark.parametrize(
    "parts, size", [(1, 1), (1, 3), (1, 7), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (4, 1)]
)


@CUTS
@pytest.mark.parametrize("last", ["pad", "drop"])
def test_every_part_has_the_same_number_of_full_batches(ten, parts, size, last):
    made = shards(ten, parts, batch_size=size, last=last)
    assert sum(shard.part_records for shard in made) == 10
    for epoch in zip(*(epochs(shard, 3) for shard in made)):
        assert {len(part) for part in epoch} == {made[0].batches_per_epoch}
        assert {len(batch) for part in epoch for batch in part} == {size}
        if last == "pad":
            assert {i for part in epoch for batch in part for i in batch} == set(range(10))
    assert made[0].batches_per_epoch * size * parts <= 10 or last == "pad"


def test_mxnets_own_parts_differ_in_length(ten):
    """What this module is for."""
    made = shards(ten, 4, batch_size=1)
    assert [len(labels(read(shard))) for shard in made] == [3, 3, 3, 1]
    assert [len(epochs(shard, 1)[0]) for shard in made] == [3, 3, 3, 3]


def test_the_next_epoch_goes_on_with_what_was_left_out(ten):
    shard = record_shard(ten, batch_size=4, last="drop")
    assert shard.batches_per_epoch == 2
    first, second = epochs(shard, 2)
    assert first == [[0, 1, 2, 3], [4, 5, 6, 7]] and second[0][:2] == [8, 9]


def test_shuffled_parts_have_another_order_in_each_epoch(ten):
    first, again, third = (epochs(record_shard(ten, batch_size=5, seed=s), 2, shuffle=True)
                           for s in (1, 1, 2))  # fmt: skip
    assert first == again != third and first[0] != first[1]
    assert sorted(i for batch in first[0] for i in batch) == list(range(10))


@CUTS
def test_evaluation_sees_each_record_once_every_time(ten, parts, size):
    for _ in range(3):
        seen = Counter()
        for shard in shards(ten, parts, batch_size=size):
            for data, label_ in shard.each_once(read(shard)):
                assert len(data) == len(label_) <= size
                seen.update(label_.asnumpy().astype(int).tolist())
        assert seen == Counter(range(10))


def test_any_data_iter_can_be_made_equal():
    inner = mx.io.NDArrayIter(np.arange(5), np.arange(5), batch_size=2)
    batches = EqualBatches(inner, np.int64(4))
    assert labels(batches) == [[0, 1], [2, 3], [4, 0], [0, 1]]
    assert batches.provide_data == inner.provide_data and batches.batch_size == 2
    assert batches.provide_label == inner.provide_label
    assert labels(batches) == []  # until reset
    batches.reset()
    assert [batch.pad for batch in batches] == [0] * 4


class _Nothing(mx.io.DataIter):
    provide_data = provide_label = ()

    def next(self):
        raise StopIteration


def test_an_iterator_without_batches_is_an_error_and_no_hang():
    with pytest.raises(ValueError, match="_Nothing has no batch, also after a reset"):
        EqualBatches(_Nothing(2), 3).next()


def test_gluons_dataset_of_records_is_shared_by_the_sampler(ten):
    data = gluon.data.vision.ImageRecordDataset(str(ten))
    seen, sizes = [], set()
    for rank in range(3):
        mine = ShardSampler(len(data), num_workers=3, worker_rank=rank)
        loader = gluon.data.DataLoader(
            data.transform(lambda image, i: (image[:8], i)), 2, sampler=mine, num_workers=1
        )
        batches = [y.asnumpy().astype(int).tolist() for _, y in loader]
        sizes.add(tuple(map(len, batches)))
        seen += [i for batch in batches for i in batch]
    assert sizes == {(2, 2)} and set(seen) == set(range(10))


def parts_of_the_job(path):
    from gluon_esgd.data import record_shard

    return record_shard(path, batch_size=1)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(3), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 1, "esgd"), marks=pytest.mark.servers),
    ],
    ids=label,
)
def test_the_parts_are_those_of_the_job(pools, shape, ten):
    made = pools.get(shape).run(parts_of_the_job, str(ten))
    assert [(s.num_parts, s.part_index) for s in made] == [
        (shape.workers, rank) for rank in range(shape.workers)
    ]
    assert len({s.batches_per_epoch for s in made}) == 1
    assert isinstance(made[0], RecordShard) and made[0].seed == 0


@pytest.mark.parametrize("parts, size, shortest", [(6, 1, 0), (4, 2, 1), (1, 11, 10), (11, 1, 0)])
def test_a_part_that_is_too_short_is_refused_on_every_worker(ten, parts, size, shortest):
    """MXNet's reader would raise on the last worker, and the others would wait for it."""
    for rank in range(parts):
        with pytest.raises(
            ValueError, match=f"10 records: the last of {parts} parts has {shortest}"
        ):
            record_shard(ten, batch_size=size, num_parts=parts, part_index=rank)


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
        ({"batch_size": 2.0}, TypeError, r"batch_size=2\.0 must be an integer"),
        ({"batch_size": 2, "last": "keep"}, ValueError, "last='keep' must be 'pad' or 'drop'"),
        ({"batch_size": 2, "seed": 1 << 31}, ValueError, "seed=2147483648 must be 0 or more and"),
        ({"batch_size": 2, "num_parts": 2}, ValueError, "num_parts=2 with part_index=None"),
        ({"batch_size": 2, "num_parts": 2, "part_index": 2}, ValueError, "part_index=2 must lie"),
        ({"batch_size": 2, "path_imgidx": "no.idx"}, FileNotFoundError,
         "no.idx is missing; gluon_esgd.data.write_index makes it"),
    ],
)  # fmt: skip
def test_bad_arguments(ten, kwargs, error, message):
    with pytest.raises(error, match=message):
        record_shard(ten, **kwargs)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.rec is missing$"):
        record_shard(tmp_path / "none.rec", batch_size=1)
