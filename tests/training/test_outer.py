"""Momentum of the center in whole jobs."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import mxnet as mx
import pytest

from ..pool import Pools, Shape, label
from .problems import FEATURES, assert_at_the_minimum, flat, network, solve_regression

pytestmark = pytest.mark.servers

# The momentum belongs to the job, so these are not the jobs of other tests: a setting tells them
# apart.
OWN = (("GLUON_ESGD_START_TIMEOUT_S", "119"),)
OUTER = {"momentum": 0.9, "learning_rate": 0.2}
ESGD, ASGD = Shape(4, 2, 2, "esgd", settings=OWN), Shape(2, 2, 1, "asgd", settings=OWN)

CASES = [("esgd", ESGD, {"interval": 4, "lazy": 2}), ("asgd", ASGD, {})]


@pytest.mark.parametrize(("rule", "shape", "settings"), CASES, ids=[label(s) for _, s, _ in CASES])
def test_rules_reach_the_minimum_of_a_convex_problem(
    pools: Pools, rule: str, shape: Shape, settings: Dict[str, Any]
) -> None:
    assert_at_the_minimum(pools.get(shape).run(_solve, rule, settings))


def _solve(rule: str, settings: Dict[str, Any]) -> Any:
    return solve_regression(rule, 200, 0.1, outer=OUTER, **settings)


@pytest.mark.parametrize("shape", [ESGD], ids=label)
def test_two_trainers_and_a_reset(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_two_trainers)
    for first, second, wanted, center in results:
        assert first == results[0][0] and second == results[0][1]  # clients as at the start
        assert wanted == results[0][2] == center  # client 0's, to the bit
    assert results[0][0] != results[0][1]


def _two_trainers() -> Tuple[bytes, ...]:
    from gluon_esgd import ElasticTrainer, world

    nets = [network(seed=10 * i + world().client) for i in (1, 2)]
    trainers = [
        ElasticTrainer(n.collect_params(), "sgd", {"learning_rate": 0}, interval=1, outer=OUTER)
        for n in nets
    ]
    for net, trainer in zip(nets, trainers):
        _step(net, trainer)
    seeded: List[bytes] = []
    for net, trainer in zip(nets, trainers):
        trainer.reset_center()
        seeded.append(flat(net).tobytes())
    for param in nets[0].collect_params().values():  # move apart, then together
        param.set_data(param.data() + world().client + 1)
    for _ in range(3):
        _step(nets[0], trainers[0])
    wanted = flat(nets[0]).tobytes()
    trainers[0].reset_center()
    after = flat(nets[0]).tobytes()
    with trainers[0].center(sync=True):
        center = flat(nets[0]).tobytes()
    with trainers[1].center(sync=True):
        assert flat(nets[1]).tobytes() == seeded[1]  # what is done to one is not to the other
    for trainer in trainers:
        trainer.finish()
    if world().client == 0:
        assert after == wanted
    return seeded[0], seeded[1], after, center


def _step(net: Any, trainer: Any) -> None:
    with mx.autograd.record():
        loss = net(mx.nd.ones((2, FEATURES))).sum()
    loss.backward()
    trainer.step(2)
