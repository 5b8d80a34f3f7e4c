import copy
import json
import math
import re
import threading
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from gluon_esgd import metrics
from gluon_esgd.metrics import OverRanks, average, clients, joining

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

        def allgather(value, what=None):
            self.box[rank] = json.dumps(value)  # what the real one can carry
            self.meet.wait(20)
            out = [json.loads(text) for text in self.box]
            self.meet.wait(20)
            return out

        return SimpleNamespace(
            rank=rank, size=self.size, is_leader=rank == 0, allgather=allgather,
            client=self.client, num_clients=self.num_clients,
            broadcast=lambda value: allgather(value)[0],
            on_leader=lambda action: action() if rank == 0 else None,
            settings=SimpleNamespace(job_dir=self.job_dir, is_split=False),
        )  # fmt: skip

    def run(self, monkeypatch, function):
        """Return what `function` of the rank returns or raises, by rank."""
        for module in (average, joining, clients):
            monkeypatch.setattr(module, "world", self.world)
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
        monkeypatch,
        lambda r: metrics.metric_average({"loss": np.float32(r), "top1": 2.0 * r}, r + 1),
    )
    total = size * (size + 1) / 2
    mean = sum(r * (r + 1) for r in range(size)) / total
    assert results == [{"loss": pytest.approx(mean), "top1": pytest.approx(2 * mean)}] * size
    assert all(r == results[0] for r in results)
    one = Ranks(size).run(monkeypatch, lambda r: metrics.metric_average(mx.nd.array([r]), r + 1))
    assert one == [results[0]["loss"]] * size


def test_a_rank_without_samples_does_not_count(monkeypatch):
    def mean(value, weight):
        return metrics.metric_average(value, weight=weight)

    results = Ranks(2).run(monkeypatch, lambda r: mean({"loss": (math.nan, 3.0)[r]}, r))
    assert results == [{"loss": 3.0}] * 2
    none = Ranks(2).run(monkeypatch, lambda r: mean(1.0, 0))
    assert all(math.isnan(r) for r in none)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: ({f"loss{r == 2}": 1.0},), r"rank 2 gives .*True.*rank 0 gives .*False"),
        (lambda r: (1.0 if r else {"loss": 1.0},), r"rank 1 gives \[''\], rank 0 gives \['loss'\]"),
        (lambda r: (1.0, 1.0 - r), "weight=-1.0 of rank 2 must be 0 or more"),
        (lambda r: ("1.0" if r == 1 else 1.0,), "rank 1: value='1.0', weight=1.0 must be numbers"),
        (lambda r: ({"a": [r] if r == 2 else 1},), "rank 2: value=.*must be numbers"),
        (lambda r: (1.0, None if r == 1 else 1), "rank 1: value=1.0, weight=None must be numbers"),
    ],
)
def test_average_faults_are_raised_on_all_ranks(monkeypatch, call, message):
    for error in Ranks(3).run(monkeypatch, lambda r: metrics.metric_average(*call(r))):
        assert isinstance(error, ValueError) and re.search(message, str(error)), error


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


class Scored(mx.metric.EvalMetric):
    """A user's own, with a sum for each of two outputs."""

    def reset(self):
        self.sum_metric, self.num_inst = [0.0, 0.0], 0

    def update(self, labels, preds):
        right = preds[0].asnumpy().argmax(1) == labels[0].asnumpy()
        self.sum_metric = [self.sum_metric[0] + right.sum(), self.sum_metric[1] + (~right).sum()]
        self.num_inst += len(right)

    def get(self):
        return ["right", "wrong"], [s / max(1, self.num_inst) for s in self.sum_metric]


def _weighed(label, pred):
    """A sum, and a count that is no integer."""
    return float((pred[:, 1] * label).sum()), label.sum() / 2 + 0.3


METRICS = {
    "accuracy": mx.metric.Accuracy,
    "top2": lambda: mx.metric.TopKAccuracy(2),
    "perplexity": lambda: mx.metric.Perplexity(ignore_label=1),
    "cross-entropy": mx.metric.CrossEntropy,
    "nll": mx.metric.NegativeLogLikelihood,
    "loss": mx.metric.Loss,
    "f1": mx.metric.F1,
    "f1-micro": lambda: mx.metric.F1(average="micro"),
    "mcc": mx.metric.MCC,
    "mcc-micro": lambda: mx.metric.MCC(average="micro"),
    "pcc": mx.metric.PCC,
    "mse": mx.metric.MSE,
    "rmse": mx.metric.RMSE,
    "pearson": mx.metric.PearsonCorrelation,
    "pearson-micro": lambda: mx.metric.PearsonCorrelation(average="micro"),
    "custom": lambda: mx.metric.CustomMetric(_weighed),
    "own": lambda: Scored("own"),
    "composite": lambda: mx.metric.CompositeEvalMetric(
        [mx.metric.F1(average="micro"), mx.metric.CompositeEvalMetric(["acc", "mcc"])]
    ),
}  # fmt: skip
CLASSES = dict.fromkeys(METRICS, 2)
CLASSES.update(dict.fromkeys(["accuracy", "top2", "perplexity", "pcc", "cross-entropy"], 4))


def seen_by(name, rank, size):
    """Batches of one rank, of different lengths; the last of several ranks has none at all."""
    random = np.random.RandomState(1)
    for i in range(6):
        n = 5 + i
        scores = random.rand(n, CLASSES[name]).astype("f")
        labels = random.randint(0, CLASSES[name], n)
        if size == 1 or i % max(1, size - 1) == rank:
            value = scores / scores.sum(1, keepdims=True)
            if name.startswith("pearson") or name.endswith("mse"):
                value = value[:, 1]
            yield mx.nd.array(labels), mx.nd.array(value)


def updated(name, rank, size, wrap=lambda metric: metric):
    metric = wrap(METRICS[name]())
    for label, value in seen_by(name, rank, size):
        metric.update([label], [value])
    return metric


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", METRICS)
def test_ranks_have_the_value_of_all_samples(monkeypatch, name, size):
    """As in one process that sees all batches; one rank of several has seen none."""
    expected = dict(updated(name, 0, 1).get_name_value())
    assert not any(math.isnan(v) for v in expected.values())
    results = Ranks(size).run(monkeypatch, lambda r: metrics.over_ranks(updated(name, r, size)))
    assert results == [pytest.approx(expected, rel=1e-6)] * size
    assert all(result == results[0] for result in results), "other bits on another rank"


@pytest.mark.parametrize("name", METRICS)
def test_nothing_anywhere_is_what_gluon_says_of_nothing(monkeypatch, name):
    expected = dict(METRICS[name]().get_name_value())
    results = Ranks(2).run(monkeypatch, lambda r: metrics.over_ranks(METRICS[name]()))
    assert results == [pytest.approx(expected, nan_ok=True)] * 2


@pytest.mark.parametrize("name", METRICS)
def test_a_wrapped_metric_tells_all_ranks_the_same(monkeypatch, name):
    expected = updated(name, 0, 1).get()

    def one(rank):
        metric = updated(name, rank, 2, OverRanks)
        told = metric.get()
        again = copy.deepcopy(metric).get_name_value()
        joined = metrics.over_ranks(metric)
        metric.reset()
        return told, again, joined, np.sum(metric.get()[1])

    for (names, values), again, joined, after in Ranks(2).run(monkeypatch, one):
        assert names == expected[0] and values == pytest.approx(expected[1], rel=1e-6)
        assert dict(again) == joined == dict(zip(np.atleast_1d(names), np.atleast_1d(values)))
        assert math.isnan(after) or after == 0


def test_global_values_outlive_a_local_reset(monkeypatch):
    def one(rank):
        out = []
        for name in ("accuracy", "f1-micro", "pcc", "perplexity"):
            metric = OverRanks(updated(name, rank, 2))
            metric.reset_local()
            local = [value for _, value in metric.get_name_value()]
            assert math.isnan(local[0])
            out.append(metric.get_global_name_value())
        return out

    alone = [updated(n, 0, 1) for n in ("accuracy", "f1-micro", "pcc", "perplexity")]
    expected = [(name, pytest.approx(value)) for m in alone for name, value in m.get_name_value()]
    for told in Ranks(2).run(monkeypatch, one):
        assert [pair for part in told for pair in part] == expected


def test_a_wrapped_metric_is_of_its_class_and_shares_its_state():
    loss = mx.metric.Loss("cost")
    wrapped = OverRanks(loss)
    assert isinstance(wrapped, mx.metric.Loss) and isinstance(wrapped, OverRanks)
    wrapped.update(0, [mx.nd.array([1, 3])])
    wrapped.name = "training " + wrapped.name  # as the Estimator does
    assert loss.get() == wrapped.get() == ("training cost", 2.0)
    assert "training cost" in str(wrapped) and "2.0" not in str(wrapped)
    twice = OverRanks(wrapped)
    twice.update(0, [mx.nd.array([8])])
    assert type(twice).__mro__.count(OverRanks) == 1 and loss.get()[1] == 4.0
    with pytest.raises(ValueError, match="metric='acc' must be an EvalMetric"):
        OverRanks("acc")


class Hoarder(mx.metric.EvalMetric):
    """Keeps what it has seen in a list of its own, as detection metrics do."""

    def reset(self):
        super().reset()
        self.seen = []

    def update(self, labels, preds):
        self.seen += preds

    def get(self):
        return self.name, max(self.seen)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: hoarding(r + 1), "Hoarder 'h' has a state beside sum_metric and num_inst"),
        (lambda r: hoarding(*[1] * r), r"metrics of rank 0: get\(\) of 'h' failed: ValueError"),
        (lambda r: mx.metric.create(("acc", "mse")[r]), "rank 1 has the metrics .*MSE.*Accuracy"),
        (lambda r: with_sum("many" if r else 0.0), "metrics of rank 1: sum_metric='many' of Acc"),
    ],
    ids=["values", "get", "kinds", "sums"],
)
def test_what_cannot_be_joined_is_refused_on_all_ranks(monkeypatch, make, message):
    for wrap in (metrics.over_ranks, lambda metric: OverRanks(metric).get()):
        for error in Ranks(2).run(monkeypatch, lambda r: wrap(make(r))):  # noqa: B023
            assert isinstance(error, ValueError) and re.search(message, str(error)), error


def hoarding(*seen):
    metric = Hoarder("h")
    metric.update([], [*seen])
    return metric


def with_sum(value):
    metric = mx.metric.Accuracy()
    metric.sum_metric = value
    return metric


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
        metrics.metric_average({"a": rank + 1.0}, weight=rank),
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


def in_mid_run():
    from gluon_esgd import world

    from .training.problems import batches, make_trainer, network, train_step

    net = network(hidden=2000)
    trainer = make_trainer(net, interval=1)
    shared = []
    for x, y in zip(*batches(6)):
        train_step(net, trainer, x, y)
        shared.append(metrics.share_with_main({"client": world().client}))
    trainer.finish()
    return shared


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(4, 2, 0, "esgd")], ids=["split"])
def test_results_are_shared_while_exchanges_are_in_flight(pools, shape):
    for shared in pools.get(shape).run(in_mid_run)[:2]:
        assert shared == [[{"client": 0}, {"client": 1}]] * 6


@pytest.mark.servers
@pytest.mark.parametrize(
    "shape", [Shape(4, 2, 1, "esgd"), Shape(4, 2, 0, "esgd")], ids=["jobs", "split"]
)
def test_clients_of_a_job_find_each_other(pools, shape):
    results = [r[2] for r in pools.get(shape).run(on_real_ranks)]
    assert results[:2] == [[{"client": 0}, {"client": 1}]] * 2
    assert results[2:] == [[None, {"client": 1}]] * 2
