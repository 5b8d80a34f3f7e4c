"""What exchanges with servers and among leaders add to a step, and how long they take."""

import math
from dataclasses import replace

import pytest

from gluon_esgd.predict import Configuration, predict

from .ideal import MB, NEVER, cluster, work


def lone(interval=1, **more):
    """One client on the server's host, one beside it: 1 MB at 1 MB/s, D = 2 s; a step is 0.5 s."""
    how = Configuration("asgd", 2, 2, interval=interval, **more)
    return predict(work(1 * MB, 0.5), cluster(2, 1, 1 * MB), how)


@pytest.mark.parametrize(("duplex", "seconds"), [(1.0, 20), (0.0, 40), (0.5, 30)])
def test_a_client_pulls_while_others_push(duplex, seconds):
    on, how = cluster(constants={"duplex": duplex}), Configuration("esgd", 12, 12)
    assert predict(work(), on, how).exchange_s == pytest.approx(seconds)
    one = predict(work(), on, replace(how, workers=2, clients=2, interval=NEVER))
    assert one.exchange_s == pytest.approx(0, abs=1e-6)  # both on the server's host
    lone = predict(
        work(), cluster(2, 1, constants={"duplex": duplex}), replace(how, workers=2, clients=2)
    )
    assert lone.exchange_s == pytest.approx(4)  # nobody else: one after the other
    slow = cluster(server_hosts=1, server_link_bytes_per_s=1 * MB, constants={"duplex": duplex})
    alone = predict(work(), slow, replace(how, workers=1, clients=1, servers=1))
    assert alone.exchange_s == pytest.approx(50)


def test_due_steps_copy_the_weights_and_add_a_shift():
    memory = {"memory_bytes_per_s": 100 * MB}
    how = Configuration("asgd", 4, 4, interval=2)
    for cores, seconds in ((None, 6 * 2 * 0.25), (2, 6 * 4 * 0.25)):  # of a host, of the machine
        on = cluster(2, 2, 1e18, constants=memory, cores=cores)
        assert predict(work(), on, how).parts["fixed"] == pytest.approx(seconds / 2)


def test_an_exchange_hides_behind_lazy_steps():
    told = lone(interval=8, lazy=4)
    assert (told.step_s, told.exchange_s) == (pytest.approx(0.5), pytest.approx(2))
    assert told.steps_per_exchange == 8


def test_a_step_waits_for_an_exchange_that_is_not_back():
    assert lone().step_s == pytest.approx(2.0)  # one after the other
    assert lone(interval=8).step_s == pytest.approx(0.5 + 1.5 / 8)
    assert lone(interval=8, lazy=0, center_wait_s=3.0).step_s == pytest.approx(0.5 + 2 / 8)


def test_a_late_exchange_is_waited_for_once_and_put_off():
    told = lone(interval=2, center_wait_s=1.0)  # back 0.5 s after the wait: at the next due step
    assert told.steps_per_exchange == 4
    assert told.step_s == pytest.approx(0.5 + 1 / 4)
    assert lone(interval=1, center_wait_s=0.2).steps_per_exchange == 1 + math.ceil(1.3 / 0.5)


def test_a_broadcast_follows_where_a_client_has_several_hosts():
    how = Configuration("esgd", 12, 2, interval=64, center_wait_s=0.0)
    told = predict(work(), cluster(), how)
    per = told.steps_per_exchange
    assert told.parts["broadcast of exchanges"] == pytest.approx(4 / 3 * 2 / per)
    assert told.parts["links shared with exchanges"] == pytest.approx(shared(told))


def shared(told):
    """What a ring of 8/3 s loses that has half of a link while an exchange is on it."""
    busy = told.exchange_s / told.steps_per_exchange / told.step_s
    return 8 / 3 / (1 - busy / 2) - 8 / 3


def test_a_link_of_servers_alone_disturbs_no_ring():
    on = cluster(server_hosts=1, server_link_bytes_per_s=1 * MB)
    told = predict(work(), on, Configuration("esgd", 12, 2))
    assert told.exchange_s > 2 * 25  # of two clients, of which one pulls while the other pushes
    assert told.parts["links shared with exchanges"] == pytest.approx(shared(told))  # of a leader


def test_a_ring_on_the_same_link_slows_an_exchange_down():
    busy = predict(work(), cluster(), Configuration("esgd", 12, 2))
    active = (8 / 3 + shared(busy)) / busy.step_s
    assert active > 0.9 and busy.exchange_s == pytest.approx(2 * 2 / (1 - active / 2))
    idle = predict(work(compute_s=1e9), cluster(), Configuration("esgd", 12, 2))
    assert idle.exchange_s == pytest.approx(4)


def test_without_servers_an_exchange_keeps_collectives_waiting():
    how = Configuration("esgd", 12, 2, servers=0, interval=4)
    told = predict(work(compute_s=0.9), cluster(), how)
    hidden = 0.3 + 0.6 / 3  # forward, and backward of the first of three buckets
    assert told.exchange_s == pytest.approx(2)  # a ring of two leaders
    assert told.parts["wait for exchanges"] == pytest.approx((2 - hidden) / 4)
    alone = predict(work(compute_s=0.9), cluster(), replace(how, clients=12))
    assert alone.parts["wait for exchanges"] == pytest.approx((10 / 3 - 0.9) / 4)
