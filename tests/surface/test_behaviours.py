"""Each behaviour in each way to run: the numbers of ``gluon.Trainer``, or the refusal stated."""

from __future__ import annotations

import re
from typing import Callable, Optional

import numpy as np
import pytest

from ..pool import Pools, Shape
from .behaviours import BEHAVIOURS
from .registry import Behaviour, Different, Refused
from .ways import WAYS, Way, alone, on_rank, reference, under_gluon


def _param(way: Way) -> object:
    marks = []
    if way.shape is not None:
        marks.append(pytest.mark.servers if way.shape.servers else pytest.mark.mpi)
    return pytest.param(way, way.shape, marks=marks, id=way.name.replace(" ", "-"))


# Those whose ranks are of no use afterwards last, so that each job is started once.
_IN_ORDER = sorted(BEHAVIOURS.values(), key=lambda behaviour: behaviour.ends_the_run)


@pytest.mark.parametrize("behaviour", _IN_ORDER, ids=lambda behaviour: behaviour.name)
@pytest.mark.parametrize(("way", "shape"), [_param(way) for way in WAYS])
def test_behaviour(
    pools: Pools,
    behaviour: Behaviour,
    way: Way,
    shape: Optional[Shape],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("cell", (behaviour.name, way.name))
    if shape is None:
        _check_alone(behaviour)
    else:
        _check_ranks(pools, behaviour, way.name, shape)


def _check_alone(behaviour: Behaviour) -> None:
    theirs, ours = under_gluon(behaviour.name), alone(behaviour.name)
    but = behaviour.exception("one process")
    if but is None:
        assert theirs.numbers is not None, theirs.error
        assert ours.numbers is not None, ours.error
        np.testing.assert_array_equal(ours.numbers, theirs.numbers)
    else:
        # What Gluon itself refuses.
        assert isinstance(but, Refused)
        assert re.search(but.error, theirs.error), theirs.error
        assert ours.error == theirs.error


def _check_ranks(pools: Pools, behaviour: Behaviour, way: str, shape: Shape) -> None:
    outcomes = pools.get(shape).run(on_rank, behaviour.name)
    pools.get(shape).broken |= behaviour.ends_the_run
    but = behaviour.exception(way)
    if isinstance(but, Refused):
        for outcome in outcomes:
            assert outcome.numbers is None, "not refused"
            assert re.search(but.error, outcome.error), outcome.error
        return
    expected = reference(behaviour.name)
    if isinstance(but, Different):
        expected = but.expected(expected)
    for outcome in outcomes:
        assert outcome.numbers is not None, outcome.error
        np.testing.assert_allclose(
            outcome.numbers, expected, rtol=2e-5, atol=1e-6 * np.linalg.norm(expected)
        )
        assert outcome.center, "the center is not finite"
    size = shape.workers // shape.clients
    for rank, outcome in enumerate(outcomes):
        leader = outcomes[rank // size * size]
        np.testing.assert_array_equal(outcome.numbers, leader.numbers, "replicas differ")
        assert outcome.end == leader.end, "replicas differ after finish()"
