import json
import math
import threading
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from gluon_esgd import metrics

from .pool import Shape


class Ranks:
    """The ranks of a client as threads that meet in allgather."""

    def __init__(self, size, client=0, num_clients=1, job_dir=None):
        self.size, self.client, self.num_clients = size, client, num_clients
        self.job_dir = job_dir
        self.meet, self.box = threading.Barrier(size), [None] * size
        self.mine = threading.local()

    def world(self):
        rank = self.mine.rank

        def allgather(value):
            self.box[rank] = json.dumps(value)  # what the real one can carry
            self.meet.wait(20)
            out = [json.loads(text) for text in self.box]
            self.meet.wait(20)
            return out

        return SimpleNamespace(
            rank=rank, size=self.size, is_leader=rank == 0, allgather=allgather,
            client=self.client, num_clients=self.num_clients,
            broadcast=lambda value: allgather(value)[0],
            settings=SimpleNamespace(job_dir=self.job_dir),
        )  # fmt: skip

    def run(self, monkeypatch, function):
        """Return what `function` of the rank returns or raises, by rank."""
        monkeypatch.setattr(metrics, "world", self.world)
        results = [None] * self.size

        def one(rank):
            self.mine.rank = rank
            try:
                results[rank] = function(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(r,)) for r in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_average_weighs_by_samples(monkeypatch, size):
    results = Ranks(size).run(
        monkeypatch, lambda r: metrics.average({"loss": np.float32(r), "top1": 2.0 * r}, r + 1)
    )
    total = size * (size + 1) / 2
    mean = sum(r * (r + 1) for r in range(size)) / total
    assert results == [{"loss": pytest.approx(mean), "top1": pytest.approx(2 * mean)}] * size
    assert all(r == results[0] for r in results)


def test_a_rank_without_samples_does_not_count(monkeypatch):
    results = Ranks(2).run(
        monkeypatch, lambda r: metrics.average({"loss": (math.nan, 3.0)[r]}, weight=r)
    )
    assert results == [{"loss": 3.0}] * 2
    none = Ranks(2).run(monkeypatch, lambda r: metrics.average({"loss": 1.0}, weight=0))
    assert all(math.isnan(r["loss"]) for r in none)


def test_average_faults_are_raised_on_all_ranks(monkeypatch):
    results = Ranks(3).run(monkeypatch, lambda r: metrics.average({f"loss{r == 2}": 1.0}))
    for error in results:
        assert isinstance(error, ValueError)
        assert "rank 2 gives ['lossTrue'], rank 0 gives ['lossFalse']" in str(error)
    results = Ranks(2).run(monkeypatch, lambda r: metrics.average({"a": 1.0}, weight=-r))
    assert ["weight=-1.0 of rank 1" in str(error) for error in results] == [True, True]


def batches(labels, scores, size=3):
    for start in range(0, len(labels), size):
        part = slice(start, start + size)
        yield mx.nd.array(scores[part]), mx.nd.array(labels[part])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_evaluate_counts_each_sample_once(monkeypatch, size):
    rng = np.random.RandomState(0)
    scores, labels = rng.rand(10, 4).astype("float32"), rng.randint(0, 4, 10)
    net = nn.Activation("relu")  # the scores themselves: they are positive

    def metric():
        return mx.metric.CompositeEvalMetric([mx.metric.Accuracy(), mx.metric.Perplexity(None)])

    def one(rank):
        mine, used = slice(rank, None, size), metric()
        used.update([mx.nd.zeros(2)], [mx.nd.ones((2, 4))])  # what it saw before is forgotten
        return metrics.evaluate(net, batches(labels[mine], scores[mine]), used)

    alone = metric()
    alone.update([mx.nd.array(labels)], [mx.nd.array(scores)])
    expected = dict(alone.get_name_value())
    assert expected["accuracy"] == np.mean(scores.argmax(1) == labels)
    for result in Ranks(size).run(monkeypatch, one):
        assert result == pytest.approx(expected, rel=1e-5)


def test_over_ranks_leaves_the_metric(monkeypatch):
    def one(rank):
        metric = mx.metric.Accuracy()
        metric.update([mx.nd.array([0, 1])], [mx.nd.array([[1, 0], [1, 0]])])
        return [metrics.over_ranks(metric), metrics.over_ranks(metric), metric.num_inst]

    assert Ranks(2).run(monkeypatch, one) == [[{"accuracy": 0.5}, {"accuracy": 0.5}, 2]] * 2


@pytest.mark.parametrize("kind", ["F1", "MCC", "PearsonCorrelation", "PCC"])
def test_metrics_that_do_not_add_up_are_refused(kind):
    with pytest.raises(ValueError, match=f"{kind} is no mean over samples"):
        metrics.over_ranks(getattr(mx.metric, kind)())


def test_clients_leave_results_for_main(monkeypatch, tmp_path):
    job = {"num_clients": 2, "job_dir": str(tmp_path)}
    share = metrics.share_with_main
    other = Ranks(2, client=1, **job).run(monkeypatch, lambda r: share({"a": 2.0}))
    assert other == [[None, {"a": 2.0}]] * 2
    main = Ranks(2, client=0, **job).run(monkeypatch, lambda r: share({"a": 1.0}))
    assert main == [[{"a": 1.0}, {"a": 2.0}]] * 2
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == [
        "result0-client0.json",
        "result0-client1.json",
    ]
    again = Ranks(1, client=1, **job).run(monkeypatch, lambda r: share({"a": 3.0}))
    assert again == [[None, {"a": 3.0}]]
    assert (tmp_path / "state" / "result1-client1.json").exists()


def test_a_client_that_never_reports_is_none(monkeypatch, tmp_path):
    ranks = Ranks(1, num_clients=2, job_dir=str(tmp_path))
    result = ranks.run(monkeypatch, lambda r: metrics.share_with_main({"a": 1.0}, timeout_s=0.1))
    assert result == [[{"a": 1.0}, None]]


def test_no_job_folder_gives_own_only(monkeypatch):
    ranks = Ranks(1, num_clients=2)
    assert ranks.run(monkeypatch, lambda r: metrics.share_with_main({"a": 1})) == [[{"a": 1}, None]]


def on_real_ranks():
    from gluon_esgd import world

    rank, size = world().rank, world().size
    scores = mx.nd.array(np.eye(4)[[0, 1, 2, 3, 0]])
    labels = mx.nd.array([0, 1, 2, 0, 1])  # three of five are right
    mine = slice(rank, None, size)
    return [
        metrics.average({"a": rank + 1.0}, weight=rank),
        metrics.evaluate(
            nn.Activation("relu"), [(scores[mine], labels[mine])], mx.metric.Accuracy()
        ),
        metrics.share_with_main({"client": world().client}),
    ]


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(2), Shape(3)], ids=lambda s: s.workers)
def test_real_ranks_agree(pools, shape):
    n = shape.workers
    mean = sum((r + 1) * r for r in range(n)) / sum(range(n))
    expected = [{"a": pytest.approx(mean)}, {"accuracy": 0.6}, [{"client": 0}]]
    assert pools.get(shape).run(on_real_ranks) == [expected] * n


@pytest.mark.servers
@pytest.mark.parametrize("shape", [Shape(4, clients=2, servers=1, rule="esgd")], ids=["2x2"])
def test_clients_of_a_job_find_each_other(pools, shape):
    results = [r[2] for r in pools.get(shape).run(on_real_ranks)]
    assert results[:2] == [[{"client": 0}, {"client": 1}]] * 2
    assert results[2:] == [[None, {"client": 1}]] * 2
