"""Every optimizer in distributed jobs: as one process where that is exact; and exchanges."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from ..pool import Pools, Shape
from .optimizers import (
    SAMPLES,
    SETTINGS,
    SHAPES,
    STEPS,
    backward,
    digest,
    distance,
    make,
    parameters,
    train_alone,
    weights,
)

MPI = Shape(2)
SGD = Shape(4, 2, 1, "sgd")
CENTERED = [Shape(4, 2, 1, "esgd"), Shape(4, 2, 1, "asgd")]
INTERVAL = 4
FEW = 2 * INTERVAL + 1  # steps
LIMIT_S = 110  # some twenty optimizers in one call


def _contexts(devices: int) -> List[mx.Context]:
    return [mx.cpu(k) for k in range(devices)]


class Trained(NamedTuple):
    """What a rank saw of one optimizer."""

    refused: str
    weights: Optional[np.ndarray] = None
    digests: Tuple[str, ...] = ()


def _share() -> Tuple[int, int]:
    """This worker's samples among those of a step."""
    from gluon_esgd import world

    each = SAMPLES // world().num_workers
    return world().worker_rank * each, (world().worker_rank + 1) * each


def _train(form: str, dtype: str, devices: int, steps: int) -> Trained:
    from gluon_esgd import ElasticTrainer, world

    params = parameters(dtype, _contexts(devices), seed=world().rank)
    try:
        trainer = ElasticTrainer(params, make(form, multi_precision=dtype == "float16"))
    except ValueError as error:
        return Trained(str(error))
    (first, last), digests = _share(), []
    for step in range(steps):
        backward(params, step, first, last)
        trainer.step(last - first)
        digests.append(digest(params))
    trainer.finish()
    return Trained("", weights(params), tuple(digests))


def _train_all(*args: Any) -> Dict[str, Trained]:
    return {form: _train(form, *args) for form in SETTINGS}


@pytest.fixture(scope="module")
def alone() -> Dict[str, np.ndarray]:
    """What plain Gluon makes of all samples on one device."""
    forms = [form for form in SETTINGS if form != "sgld"]
    return {form: train_alone(gluon.Trainer, form)[0] for form in forms}


def _check_as_one(
    results: List[Dict[str, Trained]], alone: Dict[str, np.ndarray], refused: Dict[str, str]
) -> None:
    for form in SETTINGS:
        said = [rank[form].refused for rank in results]
        assert all(refused.get(form, "") in text for text in said), said
        if form in refused:
            assert all(said), said
            continue
        assert not any(said), said
        assert len({rank[form].digests for rank in results}) == 1, f"{form}: replicas part"
        gap = np.linalg.norm(results[0][form].weights - alone[form])
        assert gap < 1e-6 * np.linalg.norm(alone[form]), f"{form}: {gap}"


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [MPI], ids=["2"])
def test_ranks_train_as_one_process(
    pools: Pools, shape: Shape, alone: Dict[str, np.ndarray]
) -> None:
    results = pools.get(shape).run(_train_all, "float32", 1, STEPS, timeout=LIMIT_S)
    _check_as_one(results, alone, {"sgld": "optimizer 'sgld' draws its own noise"})


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [MPI], ids=["2"])
def test_ranks_with_two_devices_train_as_one_process(
    pools: Pools, shape: Shape, alone: Dict[str, np.ndarray]
) -> None:
    results = pools.get(shape).run(_train_all, "float32", 2, STEPS, timeout=LIMIT_S)
    sums = "optimizer 'lbsgd' keeps sums and counts that its devices share"
    _check_as_one(results, alone, {"sgld": "draws its own noise", "lbsgd:cumulative": sums})


@pytest.mark.servers
@pytest.mark.parametrize("shape", [SGD], ids=["4-2-1-sgd"])
def test_clients_train_as_one_process(
    pools: Pools, shape: Shape, alone: Dict[str, np.ndarray]
) -> None:
    results = pools.get(shape).run(_train_all, "float32", 1, STEPS, timeout=LIMIT_S)
    _check_as_one(results, alone, {"sgld": "optimizer 'sgld' draws its own noise"})


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [MPI], ids=["2"])
def test_half_precision(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_train_all, "float16", 2, FEW, timeout=LIMIT_S)
    start = distance(weights(parameters()))
    for form, (first, second) in {f: [r[f] for r in results] for f in SETTINGS}.items():
        assert first.digests == second.digests, form
        assert first.refused or distance(first.weights) < start, form


class Exchanged(NamedTuple):
    """What a rank saw of one optimizer that meets a center."""

    refused: str
    digests: Tuple[str, ...] = ()
    center: float = float("nan")  # its distance from the minimum
    moves: int = 0  # exchanges that moved the weights
    faults: Tuple[str, ...] = ()


def _leaves(state: Any) -> List[mx.nd.NDArray]:
    if isinstance(state, (tuple, list)):
        return [array for part in state for array in _leaves(part)]
    return [state] if isinstance(state, mx.nd.NDArray) else []


def _is_master(array: np.ndarray, weight: np.ndarray) -> bool:
    return array.dtype == np.float32 and bool((array.astype("float16") == weight).all())


class _Watch:
    """Looks at optimizer states and weights before and after each exchange, which is not lazy."""

    def __init__(self, trainer: Any, form: str, half: bool) -> None:
        self._trainer, self._half = trainer, half
        # What an exchange moves in a state: the master, and the copy of DCASGD.
        self._moved = half + (form == "dcasgd")
        self.moves, self.faults = 0, []
        exchange = trainer._replica._exchange
        self._after_update, exchange.after_update = exchange.after_update, self.after_update

    def _states(self) -> List[List[np.ndarray]]:
        states = [u.states.get(i) for i in range(len(SHAPES)) for u in self._trainer._updaters]
        return [[array.asnumpy().copy() for array in _leaves(state)] for state in states]

    def _weights(self) -> List[np.ndarray]:
        return [d.asnumpy().copy() for p in self._trainer._params for d in p.list_data()]

    def after_update(self, step: int) -> None:
        states, weights = self._states(), self._weights()
        self._after_update(step)
        shifts = [np.abs(a - b).max() for a, b in zip(weights, self._weights())]
        self.moves += any(shifts)
        if any(shifts) and step % INTERVAL:
            self.faults.append(f"step {step}: moved without an exchange")
        for old, new, weight, shift in zip(states, self._states(), self._weights(), shifts):
            changed = [b for a, b in zip(old, new) if a.tobytes() != b.tobytes()]
            fewest = self._moved if shift > 1e-3 else 0  # too little for the last bit of some
            if not fewest <= len(changed) <= self._moved:
                self.faults.append(f"step {step}: {len(changed)} arrays of a state changed")
            elif changed and self._half and not any(_is_master(c, weight) for c in changed):
                self.faults.append(f"step {step}: the weight is not its master's cast")


def _exchange(form: str, dtype: str, devices: int, steps: int, apart: float) -> Exchanged:
    """Train with exchanges; client 1 is set `apart` at the first step, so that shifts are large."""
    from gluon_esgd import ElasticTrainer, world

    params, half = parameters(dtype, _contexts(devices)), dtype == "float16"
    optimizer = make(form, multi_precision=half)
    try:
        trainer = ElasticTrainer(params, optimizer, interval=INTERVAL, lazy=0)
    except ValueError as error:
        return Exchanged(str(error))
    (first, last), digests = _share(), []
    for step in range(steps):
        before = weights(params)
        backward(params, step, first, last)
        trainer.step(last - first)
        if step == 0:
            own = trainer._replica._weights
            own.set_to(own.flat() + apart * world().client)
            watch = _Watch(trainer, form, half)
        elif (step + 1) % INTERVAL and np.abs(weights(params) - before).max() > 2.5:
            watch.faults.append(f"step {step + 1}: did not start from where the exchange left it")
        digests.append(digest(params))
    trainer.finish()
    with trainer.center(sync=True):
        center = distance(weights(params))
    return Exchanged("", tuple(digests), center, watch.moves, tuple(watch.faults))


def _exchange_all(*args: Any) -> Dict[str, Exchanged]:
    return {form: _exchange(form, *args) for form in SETTINGS}


def _check_exchanges(results: List[Dict[str, Exchanged]], devices: int, farthest: float) -> None:
    refused = {"ftrl": "computes its weights anew", "ftml": "computes its weights anew"}
    refused["sgld"] = "draws its own noise"
    if devices > 1:
        refused["lbsgd:cumulative"] = "keeps sums and counts"
    for form in SETTINGS:
        seen = [rank[form] for rank in results]
        if form in refused:
            assert all(refused[form] in s.refused for s in seen), seen
            continue
        for s in seen:
            assert not s.refused and not s.faults, (form, s)
            assert s.center < farthest, (form, s)
        assert seen[0].digests == seen[1].digests, form
        assert seen[2].digests == seen[3].digests, form
        assert sum(s.moves for s in seen) >= 2, form


@pytest.mark.servers
@pytest.mark.parametrize("shape", CENTERED, ids=["esgd", "asgd"])
def test_exchanges_move_weights_and_nothing_else(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_exchange_all, "float32", 1, STEPS, 0.0, timeout=LIMIT_S)
    _check_exchanges(results, 1, farthest=distance(weights(parameters())))


@pytest.mark.servers
@pytest.mark.parametrize(
    ("shape", "devices"), [(CENTERED[0], 1), (CENTERED[1], 2)], ids=["esgd", "asgd"]
)
def test_exchanges_move_masters(pools: Pools, shape: Shape, devices: int) -> None:
    results = pools.get(shape).run(_exchange_all, "float16", devices, FEW, 8.0, timeout=LIMIT_S)
    _check_exchanges(results, devices, farthest=12.0)
