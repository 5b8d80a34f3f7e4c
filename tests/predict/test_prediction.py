"""What a step takes: by hand, in the limits, and in whatever configuration."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from mxnet import nd
from mxnet.gluon.model_zoo import vision

from gluon_esgd.predict import (
    MODELS,
    RULES,
    Cluster,
    Configuration,
    Constants,
    Work,
    predict,
    recommend,
)

from .ideal import IDEAL, MB, NEVER, SLOW, cluster, step, work

SLOTH = 1e5  # bytes a second of what is to be the bottleneck


@pytest.mark.parametrize(
    ("duplex", "seconds"), [(1.0, 20), (0.0, 40), (0.5, 30)]
)  # of ten times 25 MB at 12.5 MB/s, each way
def test_stock_rules_push_and_pull_over_the_servers_link(duplex, seconds):
    on = cluster(constants={"stock_duplex": duplex})
    for rule in ("dist_sync", "dist_async"):
        assert step(Configuration(rule, 12), on) == pytest.approx(seconds)


@pytest.mark.parametrize(("share", "seconds"), [(1.0, 24), (0.0, 40), (0.5, 32)])
def test_rounds_of_ours_push_and_pull_beside_each_other(share, seconds):
    on, how = cluster(constants={"pipelining": share}), Configuration("sgd", 12, 12)
    of_five = replace(how, bucket_bytes=10_000_000)  # half as large, as they are between clients
    assert step(of_five, on) == pytest.approx(seconds)


def test_a_client_of_three_hosts_takes_the_ring():
    assert step(Configuration("esgd", 12, 2, interval=NEVER)) == pytest.approx(4 / 3 * 25 / 12.5)


def test_rounds_of_clients_follow_their_ring():
    # Ring 4/3, push 1 and pull 1 of the other leader, broadcast 4/3.
    one = Configuration("sgd", 12, 2, bucket_bytes=50_000_000)
    assert step(one) == pytest.approx((4 / 3 + 2 + 4 / 3) * 2)
    # Of many buckets: what goes out of the host of leader and server, the other leader's pull.
    many = replace(one, bucket_bytes=2)
    assert step(many) == pytest.approx((4 / 3 + 1 + 4 / 3) * 2)
    # Among leaders: a ring of two.
    assert step(Configuration("sgd", 12, 2, servers=0)) == pytest.approx((4 / 3 + 1 + 4 / 3) * 2)


def test_backward_hides_all_but_the_last_bucket():
    of = work(compute_s=30.0)  # 25 MB: buckets of 5 MB; backward takes 20 s, the ring 10 / 3
    how = Configuration("sgd", 12, bucket_bytes=5_000_000)
    assert step(how, of=of) == pytest.approx(30 + 10 / 3 / 5)
    slow = cluster(link=SLOW / 100)  # and now it queues since the first bucket, after 10 + 4 s
    assert step(how, slow, of) == pytest.approx(14 + 1000 / 3)
    one = Configuration("sgd", 12, bucket_bytes=1 << 30)
    assert step(one, of=of) == pytest.approx(30 + 10 / 3)
    assert step(how, of=replace(of, backward_share=0.0)) == pytest.approx(30 + 10 / 3)


def test_messages_cost_latency():
    on = cluster(link=1e18, constants={"latency_s": 1e-3, "exchange_s": 5e-3})
    how = Configuration("sgd", 12, bucket_bytes=5_000_000)
    assert step(how, on) == pytest.approx(5 * 2 * 5 * 1e-3)
    rounds = 10 * (4e-3 + 5e-3) + 10 * 2 * 2e-3  # half buckets, and the rings of three
    spread = 6 * (2 + 2) * 1e-3  # pieces of 4 MiB: scatter over 3 hosts, and a ring
    assert step(replace(how, clients=2, servers=1), on) == pytest.approx(rounds + spread)


def test_adding_and_moving_take_time():
    on = cluster(constants={"server_bytes_per_s": 1 * MB})
    assert step(Configuration("dist_sync", 12), on) == pytest.approx(12 * 25)
    assert step(Configuration("dist_sync", 12, servers=3), on) == pytest.approx(12 * 25 / 3)
    memory = cluster(1, 4, constants={"memory_bytes_per_s": 10 * MB})
    assert step(Configuration("sgd", 4), memory) == pytest.approx(2 * 4 * 2.5)


def test_pretended_hosts_share_the_cores_of_one_machine():
    on = cluster(link=1e18, cores=2, constants={"socket_bytes_per_s": 25 * MB})
    of = work(compute_s=3.0)
    assert step(Configuration("dist_sync", 12), on, of) == pytest.approx(3 + 24 / 2)
    ring = 6 * 2 * 5 / 6  # hosts, of what each takes in
    assert step(Configuration("sgd", 12), on, of) == pytest.approx(3 + ring / 2)


def test_on_pretended_hosts_clients_that_wait_for_the_wire_leave_cores_to_others():
    of, rare = work(compute_s=6.0), Configuration("esgd", 12, 2, interval=NEVER)

    def compute(how, link, cores=2):
        return predict(of, cluster(link=link, cores=cores), how).parts["compute"]

    assert compute(rare, 1e18) == pytest.approx(6)  # nobody waits
    assert compute(rare, 1.0) == pytest.approx(3, rel=1e-3)  # one client at a time
    assert compute(rare, 1.0, cores=9) == pytest.approx(6 * 9 / 12)  # no more than the cores
    assert compute(rare, 1.0, cores=None) == 6
    assert compute(Configuration("sgd", 12, 2), 1.0) == 6  # all at the same time
    half = compute(rare, SLOW)
    told = predict(of, cluster(cores=2), rare)
    assert half == pytest.approx(6 * (1 + half / told.step_s) / 2)


@pytest.mark.parametrize(
    ("bottleneck", "slow", "configuration"),
    [
        ("compute", {}, Configuration("esgd", 12, 2)),
        ("wire inside clients", {"efficiency": 1e-4}, Configuration("sgd", 12)),
        ("servers' link", {"efficiency": 1e-4}, Configuration("dist_sync", 12)),
        ("leaders' links", {"efficiency": 1e-4}, Configuration("sgd", 12, 12, 24)),
        ("servers' adding", {"server_bytes_per_s": SLOTH}, Configuration("sgd", 12, 2)),
        ("agents", {"agent_bytes_per_s": SLOTH}, Configuration("asgd", 12, 2, center_wait_s=1e6)),
        ("wire between leaders", {"efficiency": 1e-4}, Configuration("sgd", 12, 12, servers=0)),
        ("memory", {"memory_bytes_per_s": SLOTH}, Configuration("sgd", 12)),
        ("latency", {"latency_s": 99.0}, Configuration("sgd", 12)),
    ],
)
def test_the_bottleneck_is_named(bottleneck, slow, configuration):
    hosts = cluster(server_hosts=24) if bottleneck == "leaders' links" else cluster()
    on = replace(hosts, link_bytes_per_s=1e9, constants=replace(IDEAL, **slow))
    assert predict(work(compute_s=1.0), on, configuration).bottleneck == bottleneck


def test_rare_exchanges_leave_the_clients_own_mpi():
    of = work(compute_s=0.2)
    alone = step(Configuration("sgd", 6), cluster(3), of)
    for rule in ("asgd", "esgd"):
        rare = Configuration(rule, 12, 2, interval=NEVER)
        assert step(rare, of=of) == pytest.approx(alone)


def test_one_client_is_pure_mpi_whatever_the_rule():
    mpi = step(Configuration("sgd", 12))
    for rule in ("asgd", "esgd"):
        told = predict(work(), cluster(), Configuration(rule, 12))
        assert told.step_s == mpi and math.isinf(told.steps_per_exchange)
        assert told.as_dict()["steps_per_exchange"] is None


def test_more_servers_narrow_the_gap():
    elastic = Configuration("esgd", 12, 2)
    gaps = [
        step(Configuration("dist_sync", 12, servers=s)) / step(replace(elastic, servers=s))
        for s in (1, 2, 4)
    ]
    assert gaps[0] > gaps[1] > gaps[2] > 1


def test_faster_links_make_no_step_longer():
    of = work(compute_s=0.3)
    stock = [Configuration(rule, 12) for rule in ("dist_sync", "dist_async")]
    for how in [*stock, *(Configuration("sgd", 12, clients) for clients in (12, 2, 1))]:
        steps = [step(how, cluster(link=SLOW * 2**k), of) for k in range(12)]
        assert steps == sorted(steps, reverse=True)
        assert steps[-1] < 2 * of.compute_s < steps[0]


def configurations(count):
    """Whatever can be asked for."""
    for seed in range(count):
        draw = random.Random(seed)
        hosts, per_host = draw.randint(1, 9), draw.randint(1, 8)
        clients = draw.randint(1, hosts * per_host)
        workers = clients * draw.randint(1, hosts * per_host // clients)
        rule = draw.choice(RULES)
        stock = rule.startswith("dist")
        interval = draw.choice([1, 4, 64]) if rule in ("asgd", "esgd") else None
        how = Configuration(
            rule,
            workers,
            workers if stock else clients,
            draw.randint(1 if stock or rule == "asgd" else 0, 4),
            interval,
            lazy=draw.randint(0, 1),
            half_floats=not stock and draw.random() < 0.3,
            center_wait_s=draw.choice([0.0, 2.0]),
        )
        on = Cluster(
            hosts,
            per_host,
            10 ** draw.uniform(5, 11),
            server_hosts=draw.choice([0, 0, 1, 3]),
            cores=draw.choice([None, 2]),
        )
        yield how, on, Work(10 ** draw.uniform(4, 9), 10 ** draw.uniform(-6, 1))


def test_whatever_is_asked_for_has_a_sensible_answer():
    for how, on, of in configurations(600):
        told = predict(of, on, how)
        numbers = [told.step_s, told.epoch_s, told.exchange_s, told.busiest_link_bytes]
        numbers += [*told.parts.values(), *told.busy_s.values()]
        assert all(0 <= x < math.inf for x in numbers), (how, on, of, told)
        assert told.step_s == pytest.approx(sum(told.parts.values()))
        assert told.bottleneck in told.busy_s
        assert on.cores is not None or told.step_s >= of.compute_s
        assert told.steps_per_exchange % how.interval == 0 or math.isinf(told.steps_per_exchange)
        twice = predict(replace(of, samples_per_epoch=2 * of.samples_per_epoch), on, how)
        assert twice.epoch_s == pytest.approx(2 * told.epoch_s)
        assert twice.step_s == told.step_s
        steps = of.samples_per_epoch / how.workers / of.batch_size
        assert told.epoch_s == pytest.approx(steps * told.step_s)


def test_bytes_and_rates_of_another_unit_give_the_same_times():
    rates = [name for name in vars(IDEAL) if name.endswith("bytes_per_s")]
    constants = replace(Constants(), latency_s=0.0)
    for how, on, of in configurations(200):
        on, how = replace(on, constants=constants), replace(how, half_floats=False)
        larger = replace(constants, **{name: 8 * getattr(constants, name) for name in rates})
        told = predict(
            replace(of, parameter_bytes=8 * of.parameter_bytes),
            replace(on, link_bytes_per_s=8 * on.link_bytes_per_s, constants=larger),
            replace(how, bucket_bytes=8 * how.bucket_bytes),
        )
        assert told.step_s == pytest.approx(predict(of, on, how).step_s)


def test_the_page_on_choosing_has_the_same_bound_for_the_interval():
    """docs/choosing.md: interval > 8 n / (B t) max(1, p / s), servers on hosts of their own."""
    for clients, servers in ((1, 1), (8, 1), (8, 4)):
        on = cluster(8, 1, 125 * MB, {"duplex": 0.0}, server_hosts=servers)
        of = work(4 * 25.6 * MB, 0.3)
        told = predict(of, on, Configuration("esgd", clients, clients, servers, NEVER))
        bound = 8 * 25.6 / (125 * 0.3) * max(1, clients / servers)
        assert told.exchange_s / told.step_s == pytest.approx(bound)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Configuration("adam", 4), "rule 'adam' must be one of sgd, asgd, esgd, dist_sync"),
        (lambda: Configuration("sgd", 0), "workers 0 must be an integer of at least 1"),
        (lambda: Configuration("sgd", 4, 3), "clients 3 must divide workers 4"),
        (lambda: Configuration("sgd", 4, 2, interval=3), "interval 3 must be 1 under rule sgd"),
        (lambda: Configuration("esgd", 4, 2, lazy=65), "lazy 65 must not be above interval 64"),
        (lambda: Configuration("asgd", 4, 2, 0), "rule asgd needs servers: at least 1"),
        (lambda: Configuration("dist_sync", 4, 2), "as many clients as workers"),
        (lambda: Cluster(0, 1, 1.0), "hosts 0 must be an integer of at least 1"),
        (lambda: Cluster(1, 1, math.nan), "link_bytes_per_s nan must be a number above 0"),
        (lambda: Cluster(1, 1, 1.0, server_link_bytes_per_s=1.0), "needs server_hosts"),
        (lambda: Cluster(1, 1, 1.0, hosts_per_rack=1), "give both or none"),
        (lambda: Constants(efficiency=1.5), "efficiency 1.5 must be a number above 0, 1 at most"),
        (lambda: Constants(latency_s=-1), "latency_s -1 must be a number of at least 0"),
        (lambda: Work(1, 1, backward_share=2), "backward_share 2 must be a number of at least 0"),
        (lambda: Work(1, 0), "compute_s 0 must be a number of at least 1e-09"),
        (lambda: recommend(work(), cluster(), "dist_sync", 4), "must be one of sgd, asgd, esgd"),
    ],
)  # fmt: skip
def test_bad_input_is_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("name", ["resnet18_v1", "squeezenet1.0"])
def test_sizes_of_models_are_those_of_the_zoo(name):
    net = vision.get_model(name)
    net.infer_shape(nd.zeros((1, 3, 224, 224)))
    count = sum(math.prod(p.shape) for p in net.collect_params().values())
    assert MODELS[name] == count


def test_it_is_plain_python():
    text = (
        "import sys, gluon_esgd; gluon_esgd.predict.predict; "
        "assert not {'numpy', 'mxnet', 'mpi4py'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
