import json
import threading
from types import SimpleNamespace

import mxnet as mx
import pytest
import tensorboardX  # noqa: F401 (sets environment variables when imported: not in a test)
from mxnet import autograd, gluon

from gluon_esgd.counters import Counters
from gluon_esgd.telemetry import TrainingLog, read_curves
from gluon_esgd.telemetry import log as telemetry

from .pool import until


def place(monkeypatch, rank=0, client=0, size=1):
    me = SimpleNamespace(
        rank=rank,
        client=client,
        size=size,
        num_workers=2 * size,
        is_leader=rank == 0,
        is_main=rank == client == 0,
    )
    monkeypatch.setattr(telemetry, "world", lambda: me)


class Trainer:
    learning_rate = 0.5

    def __init__(self):
        self.counters = Counters(collective_bytes=7, distance=1.5)
        self._params, self._optimizer = [], SimpleNamespace(rescale_grad=1.0)


def test_curves_are_means_over_windows(tmp_path):
    with TrainingLog(Trainer(), steps=5, logdir=str(tmp_path), every=2) as log:
        for i in range(5):
            log.update(mx.nd.array([i, i + 2]), 4, accuracy=i / 10)
        log.scalar("center_accuracy", 0.25)
    got = read_curves(tmp_path / "client0")
    assert got["loss"] == [(2, 1.5), (4, 3.5), (5, 5.0)]
    assert [v for _, v in got["accuracy"]] == pytest.approx([0.05, 0.25, 0.4])
    assert got["learning_rate"] == [(2, 0.5), (4, 0.5), (5, 0.5)]
    assert got["distance"][0] == (2, 1.5) and got["collective_bytes"][0] == (2, 7.0)
    assert got["center_accuracy"] == [(5, 0.25)]
    assert set(Counters().as_dict()) < set(got)
    assert all(v > 0 for _, v in got["images_per_s"])


def test_a_plain_trainer_has_a_learning_rate_only(tmp_path):
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize()
    with TrainingLog(gluon.Trainer(net.collect_params(), "sgd"), logdir=str(tmp_path)) as log:
        log.update(1.0, 1)
    got = read_curves(tmp_path / "client0")
    assert {"loss", "images_per_s", "learning_rate", "gradient_norm", "memory/host_mb"} < set(got)
    assert not set(Counters().as_dict()) & set(got) and "time/center_s" not in got


def test_the_norm_is_that_of_the_mean_gradient(tmp_path):
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with TrainingLog(trainer, logdir=str(tmp_path)) as log:
        with autograd.record():
            loss = net(mx.nd.array([[3, 4]] * 5))
        loss.backward()
        trainer.step(5)
        log.update(loss, 5)
    assert read_curves(tmp_path / "client0")["gradient_norm"] == [(1, pytest.approx(5.0))]


def test_times_of_a_step_add_up(monkeypatch, tmp_path):
    clock = iter([-9.0, -9, 0, 1, 3, 4, 5, 11, 11, 11, 11, 11])
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    trainer = Trainer()
    with TrainingLog(trainer, logdir=str(tmp_path), every=2) as log:
        for _ in log.batches("ab"):  # from 0 on, waited for from 1 to 3, and from 4 to 5
            trainer.counters.collective_s += 0.25
            trainer.counters.center_s += 0.125
            log.update(1.0, 1)  # the second at 11
    got = {name: points[0][1] for name, points in read_curves(tmp_path / "client0").items()}
    times = {name[5:-2]: value for name, value in got.items() if name.startswith("time/")}
    assert times == {
        "step": 5.5, "input": 1.5, "compute": 4.0, "collectives": 0.25, "center": 0.125
    }  # fmt: skip


def test_what_a_restart_leaves_out_is_not_in_the_rate(monkeypatch, tmp_path):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: now.s))
    place(monkeypatch, size=2)
    with TrainingLog(logdir=str(tmp_path), every=2, first_step=6) as log:
        now.s = 100.0  # a checkpoint is loaded, and six batches are made and dropped
        for epoch in range(2):
            for _ in log.batches("ab"):
                now.s += 4.0
                log.update(1.0, 16)
            now.s += 2.0 * (epoch == 0)  # an end of an epoch counts as ever
        assert (log.seconds, log.samples) == (18.0, 64)
    rates = read_curves(tmp_path / "client0")["images_per_s"]
    assert rates == [(8, 2 * 32 / 8), (10, pytest.approx(2 * 32 / 10))]


def test_epochs_and_hyperparameters(monkeypatch, tmp_path, capsys):
    place(monkeypatch, size=2)
    with TrainingLog(Trainer(), steps=20, logdir=str(tmp_path), first_step=10) as log:
        monkeypatch.setattr(TrainingLog, "seconds", 2.0)
        log.hyperparameters({"lr": 0.5, "model": "tiny"}, ["loss", "center/top1"])
        log.update(2.0, 400)
        log.epoch(3, top1=0.5, loss=mx.nd.array([2.0]))
    told, shown = capsys.readouterr()
    assert told == "epoch 3: top1 0.5, loss 2, 400 images/s\n" and "11/20" in shown
    line = json.loads((tmp_path / "client0" / "epochs.jsonl").read_text())
    assert line.pop("time") > 1e9
    assert line == {"epoch": 3, "step": 11, "images_per_s": 400.0, "top1": 0.5, "loss": 2.0}
    assert read_curves(tmp_path / "client0")["top1"] == [(11, 0.5)]
    (events,) = (tmp_path / "client0").glob("events*")
    assert b"_hparams_/session_start_info" in events.read_bytes()
    assert b"center/top1" in events.read_bytes()
    whole = sum(map(len, read_curves(tmp_path / "client0").values()))
    events.write_bytes(events.read_bytes()[:-5])  # as a writer that was killed leaves it
    assert sum(map(len, read_curves(tmp_path / "client0").values())) == whole - 1


def test_half_precision_losses_are_averaged_in_full(tmp_path):
    with TrainingLog(logdir=str(tmp_path)) as log:
        log.update(mx.nd.full(1000, 600, dtype="float16"), 1)  # its fp16 sum is infinite
    assert read_curves(tmp_path / "client0")["loss"] == [(1, 600.0)]


@pytest.mark.parametrize(
    "rank, client, bar, writes",
    [(0, 0, True, True), (1, 0, False, False), (0, 1, False, True), (1, 1, False, False)],
)
def test_who_shows_what(monkeypatch, tmp_path, capsys, rank, client, bar, writes):
    place(monkeypatch, rank, client, size=2)
    with TrainingLog(steps=3, logdir=str(tmp_path), every=3) as log:
        for _ in range(3):
            log.update(mx.nd.ones(4), 4, accuracy=0.5)
        log.scalar("mine", 1.0)
        log.hyperparameters({"lr": 1.0})
        log.epoch(0, top1=0.5)
    told, shown = capsys.readouterr()
    assert ("3/3" in shown and "loss=1" in shown and "accuracy=0.5" in shown) == bar
    assert ("images_per_s=" in shown) == bar == ("epoch 0: top1 0.5" in told)
    assert bool(shown) == bar == bool(told)
    assert [p.name for p in tmp_path.iterdir()] == [f"client{client}"] * writes


def test_the_rate_is_that_of_the_client(monkeypatch, tmp_path):
    clock = iter([0, 0, 1, 11, 14, 14, 14, 14])
    place(monkeypatch, size=3)
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with TrainingLog(logdir=str(tmp_path), every=2) as log:
        log.update(1.0, 5)
        with log.paused():  # from 1 to 11
            pass
        log.update(1.0, 7)  # at 14
    assert read_curves(tmp_path / "client0")["images_per_s"] == [(2, 3 * 12 / 4)]


def test_values_are_read_only_every_few_steps(monkeypatch):
    reads = []
    monkeypatch.setattr(telemetry, "_number", lambda v: reads.append(log.step) or 0.0)
    with TrainingLog(every=4) as log:
        for _ in range(8):
            log.update(mx.nd.ones(2), 1)
    assert reads == [4, 8]


def test_ranks_that_show_nothing_do_not_run_ahead(monkeypatch):
    place(monkeypatch, rank=1)
    waits = []
    monkeypatch.setattr(mx.nd.NDArray, "wait_to_read", lambda self: waits.append(log.step))
    log = TrainingLog(every=3)
    for _ in range(7):
        log.update(mx.nd.ones(2), 1)
    assert waits == [3, 6]


def test_a_failure_inside_comes_out_and_leaves_nothing(tmp_path):
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), TrainingLog(logdir=str(tmp_path), every=9) as log:
        log.update(1.0, 1)
        raise ZeroDivisionError
    assert "loss" not in read_curves(tmp_path / "client0")  # nothing is read from a broken engine
    log.close()
    until(lambda: threading.active_count() <= before, 20.0)
    assert threading.active_count() == before


def test_every_is_checked():
    with pytest.raises(ValueError, match="every=0 must be 1 or more"):
        TrainingLog(every=0)
