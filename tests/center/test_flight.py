"""What a leader makes of an exchange whose agent is dead, by how far it had come."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import pytest

from gluon_esgd.center import AVERAGED, CARRIED, MOVED
from gluon_esgd.center.flight import BACK, FAILED, FLYING, LOST, Flight
from gluon_esgd.center.generation import Request
from gluon_esgd.center.memory import ACKNOWLEDGED, IDLE, PULLING, PUSHING, Memory

SERIAL = 7


class _Agent:
    ended = False


class _Generation:
    number = 3

    def __init__(self) -> None:
        self.agent = _Agent()


def _flight(rule: str, serial: int, stage: int) -> Any:
    memory = Memory.create([2, 2, 2], [(0, 6)])
    memory.kinds[:] = MOVED, AVERAGED, CARRIED
    memory.x[:], memory.base[:] = 2, 1
    memory.set_stage(serial, stage)
    generation: Any = _Generation()
    return Flight(SERIAL, rule, memory, generation, Request()), memory, generation


@pytest.mark.parametrize(
    ("rule", "serial", "stage", "fate", "base"),
    [
        ("esgd", SERIAL - 1, ACKNOWLEDGED, LOST, 1),  # of the exchange before: it has not begun
        ("esgd", 0, IDLE, LOST, 1),
        ("esgd", SERIAL, PULLING, LOST, 1),
        ("esgd", SERIAL, PUSHING, LOST, 1),
        ("esgd", SERIAL, ACKNOWLEDGED, BACK, 1),
        ("asgd", SERIAL - 1, ACKNOWLEDGED, LOST, 1),
        ("asgd", SERIAL, PUSHING, LOST, 2),
        ("asgd", SERIAL, ACKNOWLEDGED, LOST, 2),
    ],
)
def test_the_fate_of_an_exchange_is_read_from_memory_when_the_agent_is_dead(
    rule: str, serial: int, stage: int, fate: str, base: int
) -> None:
    flight, memory, generation = _flight(rule, serial, stage)
    flight.land()
    assert flight.state == FLYING
    flight._request.lost = True
    flight.land()
    assert flight.state == FLYING and flight.uses_buffers  # it may still write
    generation.agent.ended = True
    flight.land()
    assert flight.state == fate and flight.uses_buffers == (fate == BACK)
    assert memory.base.tolist() == [base, base, base, base, 1, 1]
    memory.close()


@pytest.mark.parametrize("error", [None, "it broke"])
def test_an_answer_counts_whatever_became_of_the_agent(error: Optional[str]) -> None:
    flight, memory, _ = _flight("esgd", SERIAL, PUSHING)
    flight._request.done, flight._request.error = error is None, error
    flight.land()
    assert flight.state == (FAILED if error else BACK) and flight.error == (error or "")
    memory.buffers[1][:] = np.arange(6)
    memory.set_center(1, 0)
    if not error:
        assert flight.copied_shift().tolist() == [0, -1, -2, -3, -4, -5]
    memory.close()
