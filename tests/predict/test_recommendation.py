"""Which number of clients and which interval are recommended."""

from dataclasses import replace

import pytest

from gluon_esgd.predict import Constants, recommend

from .ideal import MB, NEVER, SLOW, cluster, step, work


@pytest.mark.parametrize("link", [SLOW, 10 * SLOW, 100 * SLOW, 1000 * SLOW])
@pytest.mark.parametrize("rule", ["sgd", "asgd", "esgd"])
def test_what_is_recommended_is_cheap_and_in_time(link, rule):
    on = replace(cluster(link=link), constants=Constants())
    choices = recommend(work(compute_s=0.3), on, rule, 12)
    (best,) = [choice for choice in choices if choice.is_best]
    how, told = best.configuration, best.prediction
    steps = [choice.prediction.step_s for choice in choices]
    assert steps == sorted(steps)
    if how.exchanges:
        never = replace(how, interval=NEVER)
        assert told.steps_per_exchange == how.interval
        assert told.step_s <= 1.03 * step(never, on, work(compute_s=0.3))
        shorter = [
            c for c in choices
            if c.configuration.clients == how.clients and c.configuration.interval < how.interval
        ]  # fmt: skip
        for c in shorter:
            plain = step(replace(c.configuration, interval=NEVER), on, work(compute_s=0.3))
            late = c.prediction.steps_per_exchange > c.configuration.interval
            assert late or c.prediction.step_s > 1.03 * plain
    # What is clearly faster has no interval of its own that is cheap, or pays for a longer one.
    assert {c.configuration.clients for c in choices} == {1, 2, 3, 4, 6, 12}


def test_an_interval_that_is_cheap_since_exchanges_are_late_is_not_recommended():
    # 10 x 25 s to push, as much to pull.
    of, on = work(compute_s=10.0), cluster(link=1 * MB, constants={"duplex": 0.0})
    choices = recommend(of, on, "esgd", 12, clients=[12])
    (best,) = [choice for choice in choices if choice.is_best]
    assert (best.configuration.interval, best.configuration.lazy) == (64, 50)
    assert best.prediction.parts["wait for exchanges"] == 0
    one = recommend(of, on, "esgd", 12, clients=[12], intervals=[16], lazy=2)[0]
    assert one.configuration.lazy == 2 and one.prediction.step_s < 1.03 * of.compute_s
    assert one.prediction.steps_per_exchange > 16


def test_slow_networks_get_clients_and_fast_ones_pure_mpi():
    def clients(link):
        choices = recommend(
            work(compute_s=0.3), replace(cluster(link=link), constants=Constants()), "esgd", 12
        )
        return next(c.configuration.clients for c in choices if c.is_best)

    assert clients(1000 * SLOW) == 1
    assert clients(10 * SLOW) > 1


def test_thousands_of_workers():
    of, on = work(102 * MB, 0.35), replace(cluster(1250, 8, 1250 * MB), constants=Constants())
    choices = recommend(of, on, "esgd", 10_000, servers=64)
    (best,) = [choice for choice in choices if choice.is_best]
    assert best.prediction.steps_per_exchange == best.configuration.interval
    assert best.prediction.step_s < 1.2 * of.compute_s
    assert len({choice.configuration.clients for choice in choices}) == 25
