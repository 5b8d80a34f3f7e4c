"""What a client's exchanges do while servers are replaced: the center is played by the test."""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Tuple

import mxnet as mx
import numpy as np
import pytest

from ..pool import Pools, Shape
from .problems import flat, network

ONE, TWO = Shape(1), Shape(2)
START, ALPHA = 4, 0.45


class _Box:
    """A mailbox that says what it was told to say, exchange by exchange."""

    def __init__(self, plan: List[str], joined: bool) -> None:
        self.plan, self.joined, self.in_flight = list(plan), joined, False
        self.alphas: List[float] = []
        self.waits: List[float] = []
        self.distance, self.bytes_moved = 1.0, 0

    def seed(self, seeder: bool, out: np.ndarray, resumed: bool = False) -> bool:
        out[:] = START if self.joined else self.x
        return self.joined

    def start_exchange(self, rule: str, alpha: float, kinds: Any, timeout_s: float) -> bool:
        self.alphas.append(alpha)
        self.waits.append(timeout_s)
        self.in_flight = self.plan[0] != "skip"
        if not self.in_flight:
            self.plan.pop(0)
        return self.in_flight

    def collect(self, out: np.ndarray, timeout_s: float) -> bool:
        from gluon_esgd.center import ExchangeLost

        said = self.plan.pop(0)
        self.in_flight = said == "late"
        if said == "lost":
            out[:] = np.nan
            raise ExchangeLost("client 0: an exchange was lost")
        out[:] = 1
        return said == "done"


class _Link:
    num_servers, num_clients, compression = 1, 2, None

    def __init__(self, box: _Box) -> None:
        self.box = box

    def wait_ready(self) -> None: ...

    def attach(self, name: str, sizes: List[int], *rest: Any) -> _Box:
        self.box.x = np.zeros(sum(sizes), np.float32)
        return self.box


def _exchange(plan: List[str], joined: bool = False, **policy: Any) -> Tuple[Any, ...]:
    from gluon_esgd import world
    from gluon_esgd.counters import Counters
    from gluon_esgd.engine import lane
    from gluon_esgd.exchange import CenterExchange
    from gluon_esgd.parameters import Weights
    from gluon_esgd.policy import Policy

    net = network()
    params = list(net.collect_params().values())
    optimizer = mx.optimizer.create("sgd")
    weights = Weights(params, optimizer, [mx.optimizer.get_updater(optimizer)])
    box = _Box(plan, joined)
    link = _Link(box) if world().is_leader else None
    terms = Policy("esgd", 1, ALPHA, 0, beta=policy.pop("beta", None))
    counters = Counters()
    return CenterExchange(world(), lane(), link, "t", terms, counters), weights, net, box, counters


def _warned() -> Tuple[logging.Handler, List[str]]:
    lines: List[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gluon_esgd").addHandler(handler)
    return handler, lines


def _steps(plan: List[str]) -> Tuple[List[float], Dict[str, float], List[str]]:
    exchange, weights, net, _, counters = _exchange(plan)
    _, lines = _warned()
    exchange.start(weights, {})
    start, moves = flat(net), []
    for step in range(len(plan)):
        exchange.after_update(step + 1)
        exchange.flush() if plan[step] != "late" else exchange._settle()
        moves.append(float((flat(net) - start).mean().round(3)))
    return moves, counters.as_dict(), lines


@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_steps_go_on_without_exchanges_that_are_skipped_or_lost(pools: Pools, shape: Shape) -> None:
    plan = ["done", "skip", "skip", "lost", "done", "skip"]
    for rank, (moves, counters, lines) in enumerate(pools.get(shape).run(_steps, plan)):
        assert moves == [1, 1, 1, 1, 2, 2]
        assert counters["exchanges"] == 2 and counters["exchanges_late"] == 0
        assert counters["exchanges_skipped"] == 3 and counters["exchanges_lost"] == 1
        skips = [line for line in lines if "exchanges that are due meanwhile are skipped" in line]
        assert len(skips) == (0 if rank else 2)  # once in each row
        assert ("client 0: an exchange was lost" in lines) == (not rank)


def _last(plan: List[str]) -> Tuple[float, List[float], Dict[str, float], List[str]]:
    exchange, weights, net, box, counters = _exchange(plan)
    _, lines = _warned()
    exchange.start(weights, {})
    before = flat(net)
    exchange.exchange_now()
    return float((flat(net) - before).mean().round(3)), box.waits, counters.as_dict(), lines


@pytest.mark.parametrize(("plan", "moved"), [(["lost", "done"], 1), (["skip"], 0)])
def test_the_last_exchange_waits_for_the_next_generation(
    pools: Pools, plan: List[str], moved: int
) -> None:
    for rank, (by, waits, counters, lines) in enumerate(pools.get(TWO).run(_last, plan)):
        assert by == moved and counters["exchanges"] == moved
        if not rank:
            assert waits == [60.0] * len(plan)
            assert any("last exchange did not take place" in line for line in lines) != moved


def _alphas(beta: Optional[float]) -> Tuple[List[float], List[str]]:
    exchange, weights, _, box, _ = _exchange(["done"] * 4, beta=beta)
    _, lines = _warned()
    exchange.start(weights, {})
    for step, clients in enumerate([2, 3, 6, 6]):
        exchange._link.num_clients = clients
        exchange.after_update(step + 1)
        exchange.flush()
    return box.alphas, lines


def test_alpha_follows_the_number_of_clients_unless_it_was_given(pools: Pools) -> None:
    (followed,) = pools.get(ONE).run(_alphas, 0.9)
    assert followed == ([0.45, 0.3, 0.15, 0.15], [])
    ((alphas, lines),) = pools.get(ONE).run(_alphas, None)
    assert alphas == [ALPHA] * 4
    assert len(lines) == 1 and "alpha is 0.45 for the 6 clients" in lines[0]


def _resumed(joined: bool) -> Tuple[bool, bool, bool]:
    from gluon_esgd.states import Position

    exchange, weights, net, _, _ = _exchange([], joined)
    before = flat(net)
    exchange.resume(Position(7, 6), own=True)
    replaced = exchange.start(weights, {})
    now = flat(net)
    return replaced, bool((now == START).all()), now.tobytes() == before.tobytes()


def test_a_client_that_comes_back_takes_the_center_though_it_resumes(pools: Pools) -> None:
    assert pools.get(TWO).run(_resumed, True) == [(True, True, False)] * 2
    assert pools.get(TWO).run(_resumed, False) == [(False, False, True)] * 2
