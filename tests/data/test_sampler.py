import doctest
from collections import Counter

import pytest
from mxnet import gluon

from gluon_esgd.data import ShardSampler, sampler

WORKERS = (1, 2, 3, 4, 7)
LENGTHS = (7, 12, 101)


def shards(length, workers, epoch=0, **kwargs):
    out = []
    for rank in range(workers):
        one = ShardSampler(length, workers, rank, **kwargs)
        one.set_epoch(epoch)
        out.append(list(one))
        assert len(out[-1]) == len(one)
    return out


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_pad_covers_all_and_repeats_less_than_one_round(length, workers, epoch):
    parts = shards(length, workers, epoch)
    assert len({len(p) for p in parts}) == 1
    count = Counter(i for p in parts for i in p)
    assert set(count) == set(range(length))
    assert sum(count.values()) - length == -length % workers


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_drop_is_disjoint_and_leaves_out_less_than_one_round(length, workers):
    parts = shards(length, workers, last="drop")
    assert {len(p) for p in parts} == {length // workers}
    together = [i for p in parts for i in p]
    assert len(set(together)) == len(together) == length - length % workers


def test_fewer_samples_than_workers():
    assert {len(p) for p in shards(2, 5)} == {1}
    with pytest.raises(ValueError, match="length=2 leaves no sample for some of 5 workers"):
        ShardSampler(2, 5, 0, last="drop")


def test_each_epoch_has_another_order_and_comes_back():
    one = ShardSampler(101, 2, 1)
    first, second = list(one), list(one)
    assert one.epoch == 2 and first != second
    one.set_epoch(0)
    assert list(one) == first
    assert shards(101, 2, seed=1) != shards(101, 2, seed=0)


def test_what_is_left_out_differs_by_epoch():
    left = {frozenset(range(7)) - {i for p in shards(7, 3, e, last="drop") for i in p}
            for e in range(8)}  # fmt: skip
    assert len(left) > 1


def test_lone_process_takes_all():
    assert sorted(ShardSampler(5)) == [0, 1, 2, 3, 4]


def test_equal_batches_in_gluons_loader():
    data = gluon.data.ArrayDataset(list(range(101)))
    loaders = [
        gluon.data.DataLoader(data, 50, sampler=ShardSampler(101, 2, rank)) for rank in (0, 1)
    ]
    sizes = [[len(batch) for batch in loader] for loader in loaders]
    assert sizes[0] == sizes[1] == [50, 1]


@pytest.mark.parametrize(
    "args, message",
    [
        ((10, 2, 2), r"worker_rank=2 must lie from 0 to num_workers - 1 = 1"),
        ((10, 2, -1), "worker_rank=-1"),
        ((10, 0, 0), "worker_rank=0"),
        ((0, 1, 0), "length=0 leaves no sample"),
        ((10, 1, 0, 0, "keep"), "last='keep' must be 'pad' or 'drop'"),
    ],
)
def test_bad_arguments(args, message):
    with pytest.raises(ValueError, match=message):
        ShardSampler(*args)


def test_docstring():
    assert doctest.testmod(sampler).failed == 0
