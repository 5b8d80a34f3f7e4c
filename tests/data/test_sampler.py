import doctest
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd.data import ShardSampler, sampler

from ..pool import Shape, label

WORKERS = (1, 2, 3, 4, 7)
LENGTHS = (7, 12, 101)


def share(length, workers, rank, seed=0, **kwargs):
    return ShardSampler(length, seed, num_workers=workers, worker_rank=rank, **kwargs)


def shards(length, workers, epoch=0, **kwargs):
    out = []
    for rank in range(workers):
        one = share(length, workers, rank, **kwargs)
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


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_keep_counts_each_sample_once(length, workers, shuffle):
    parts = shards(length, workers, last="keep", shuffle=shuffle)
    assert sorted(i for p in parts for i in p) == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_in_order_workers_take_turns_in_every_epoch():
    for epoch in (0, 5):
        assert shards(7, 3, epoch, shuffle=False, last="keep") == [[0, 3, 6], [1, 4], [2, 5]]
    assert shards(7, 3, shuffle=False) == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]


def test_fewer_samples_than_workers():
    assert {len(p) for p in shards(2, 5)} == {1}
    assert [len(p) for p in shards(2, 5, last="keep")] == [1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="length=2 leaves no sample for some of 5 workers"):
        share(2, 5, 0, last="drop")


def test_each_epoch_has_another_order_and_comes_back():
    one = share(101, 2, 1)
    first, second = list(one), list(one)
    assert one.epoch == 2 and first != second
    one.set_epoch(0)
    assert list(one) == first
    assert shards(101, 2, seed=1) != shards(101, 2, seed=0)


def test_the_second_argument_is_the_seed():
    assert list(ShardSampler(101, 7)) == list(ShardSampler(101, seed=7)) != list(ShardSampler(101))
    with pytest.raises(TypeError, match="positional"):
        ShardSampler(101, 0, 2)


def test_what_is_left_out_differs_by_epoch():
    left = {frozenset(range(7)) - {i for p in shards(7, 3, e, last="drop") for i in p}
            for e in range(8)}  # fmt: skip
    assert len(left) > 1


def test_lone_process_takes_all():
    assert sorted(ShardSampler(5)) == [0, 1, 2, 3, 4]


def test_equal_batches_in_gluons_loader():
    data = gluon.data.ArrayDataset(list(range(101)))
    loaders = [gluon.data.DataLoader(data, 50, sampler=share(101, 2, rank)) for rank in (0, 1)]
    sizes = [[len(batch) for batch in loader] for loader in loaders]
    assert sizes[0] == sizes[1] == [50, 1]


@pytest.mark.parametrize("forks", [0, 2])
@pytest.mark.parametrize("last_batch", ["keep", "discard", "rollover"])
@pytest.mark.parametrize("by", ["sampler", "batch_sampler"])
def test_every_option_of_the_loader_gives_workers_the_same_sizes(forks, last_batch, by):
    data, sizes = gluon.data.ArrayDataset(list(range(101))), []
    for rank in (0, 1, 2):
        mine, again = share(101, 3, rank), share(101, 3, rank)
        batches = gluon.data.BatchSampler(mine, 10, last_batch)
        how = {"batch_size": 10, "sampler": mine, "last_batch": last_batch}
        loader = gluon.data.DataLoader(
            data, num_workers=forks, **(how if by == "sampler" else {"batch_sampler": batches})
        )
        epochs = [[batch.asnumpy().tolist() for batch in loader] for _ in range(3)]
        sizes.append([list(map(len, epoch)) for epoch in epochs])
        drawn = [i for _ in range(3) for i in again]
        got = [i for epoch in epochs for batch in epoch for i in batch]
        if last_batch != "discard":
            assert got == drawn[: len(got)]  # forked processes draw nothing of their own
    assert sizes[0] == sizes[1] == sizes[2]


def shares_of_the_job(length, epochs):
    from gluon_esgd.data import ShardSampler

    mine = ShardSampler(length, 3)
    return [list(mine) for _ in range(epochs)]


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(2), marks=pytest.mark.mpi),
        pytest.param(Shape(3), marks=pytest.mark.mpi),
        pytest.param(Shape(4, 2, 1, "esgd"), marks=pytest.mark.servers),
    ],
    ids=label,
)
def test_workers_of_a_job_share_every_epoch(pools, shape):
    """Union and intersection over all ranks of all clients, for three epochs."""
    ranks = pools.get(shape).run(shares_of_the_job, 60, 3)
    for epoch in range(3):
        parts = [rank[epoch] for rank in ranks]
        assert sorted(i for p in parts for i in p) == list(range(60))
    assert ranks[0][0] != ranks[0][1] != ranks[0][2]


def test_numbers_that_numpy_made():
    of, one = np.int64(2), np.int32(1)
    mine = share(np.int64(10), of, one, seed=np.uint32(4))
    mine.set_epoch(np.int64(3))
    assert shards(10, 2, 3, seed=4)[1] == list(mine)
    assert all(type(i) is int for i in mine)


@pytest.mark.parametrize(
    "args, kwargs, error, message",
    [
        ((10,), {"num_workers": 2, "worker_rank": 2}, ValueError,
         "worker_rank=2 must lie from 0 to num_workers - 1 = 1"),
        ((10,), {"num_workers": 2, "worker_rank": -1}, ValueError, "worker_rank=-1 must be 0"),
        ((10,), {"num_workers": 0, "worker_rank": 0}, ValueError, "worker_rank=0 must lie"),
        ((10,), {"num_workers": 2}, ValueError, "num_workers=2 with worker_rank=None: give both"),
        ((10,), {"worker_rank": 1}, ValueError, "num_workers=None with worker_rank=1: give both"),
        ((10,), {"num_workers": 2.0, "worker_rank": 0}, TypeError, r"num_workers=2\.0 must be an"),
        ((0,), {}, ValueError, "length=0 leaves no sample"),
        ((-3,), {}, ValueError, "length=-3 must be 0 or more"),
        ((10.0,), {}, TypeError, r"length=10\.0 must be an integer"),
        ((True,), {}, TypeError, "length=True must be an integer"),
        ((np.bool_(True),), {}, TypeError, "length=.*True.* must be an integer"),
        (("10",), {}, TypeError, r"length=str must be a number of samples: pass len\(data\)"),
        (([1, 2],), {}, TypeError, "length=list must be a number of samples"),
        ((10, -1), {}, ValueError, "seed=-1 must be 0 or more and below 4294967296"),
        ((10, 1 << 32), {}, ValueError, "seed=4294967296 must be 0 or more and below 4294967296"),
        ((10, None), {}, TypeError, "seed=None must be an integer"),
        ((10,), {"last": "all"}, ValueError, "last='all' must be one of 'pad', 'drop', 'keep'"),
    ],
)  # fmt: skip
def test_bad_arguments(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        ShardSampler(*args, **kwargs)


@pytest.mark.parametrize("epoch, error", [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_epochs(epoch, error):
    with pytest.raises(error, match=f"epoch={epoch!r} must be"):
        ShardSampler(10).set_epoch(epoch)


def test_docstring():
    assert doctest.testmod(sampler).failed == 0


class _Heard:
    """What a leader has heard of the clients of its job."""

    def __init__(self, clients, place):
        self.clients_now = lambda: (clients, place)


@pytest.mark.parametrize(("clients", "place"), [(3, 1), (2, 1), (1, 0)])
def test_the_set_is_shared_anew_among_the_clients_that_there_are(monkeypatch, clients, place):
    sampler = ShardSampler(30, seed=4)
    monkeypatch.setattr("gluon_esgd.data.sampler.job", lambda: _Heard(clients, place))
    assert sampler.share_anew() == (clients, place)
    other = ShardSampler(30, seed=4, num_workers=clients, worker_rank=place)
    assert list(sampler) == list(other) and len(sampler) == 30 // clients


def test_shares_that_were_given_stay_and_so_do_those_that_would_leave_somebody_none(
    monkeypatch, caplog
):
    monkeypatch.setattr("gluon_esgd.data.sampler.job", lambda: _Heard(9, 4))
    given = ShardSampler(30, num_workers=2, worker_rank=0)
    few = ShardSampler(8, last="drop")
    assert given.share_anew() == few.share_anew() == (9, 4)
    assert (len(given), len(few)) == (15, 8)
    assert "8 samples are too few for 9 workers" in caplog.text
    caplog.clear()
    other = SimpleNamespace(rank=1, size=2, is_leader=False)
    monkeypatch.setattr("gluon_esgd.data.sampler.world", lambda: other)
    assert few.share_anew() == (9, 4) and not caplog.text, "the leader has said so"
