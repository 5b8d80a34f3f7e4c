"""A logger that speaks once."""

from __future__ import annotations

import logging
from typing import List

import pytest

from gluon_esgd import get_logger

from .pool import Pools, Shape
from .training.shapes import ANY_RANKS


def _logged() -> List[str]:
    """What a handler of the script's own gets."""
    said: List[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = get_logger("a script's own")
    logger.logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.info("epoch %d", 3)
    logger.debug("not at this level", main_process_only=False)
    logger.warning("loss %.1f", 0.5, main_process_only=False)
    logger.logger.removeHandler(handler)
    return said


@ANY_RANKS
def test_once_or_from_every_rank(pools: Pools, shape: Shape) -> None:
    size = shape.workers // shape.clients
    for worker, said in enumerate(pools.get(shape).run(_logged)):
        everywhere = f"[client {worker // size}, rank {worker % size}] loss 0.5"
        assert said == (["epoch 3", everywhere] if worker == 0 else [everywhere])


def test_records_name_the_line_of_the_script(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("lines")
    logger.warning("one", extra={"mark": 7})
    logger.log(logging.ERROR, "two", main_process_only=False)
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("three")
    assert [(r.funcName, r.filename) for r in caplog.records] == [
        ("test_records_name_the_line_of_the_script", "test_log.py")
    ] * 3
    assert caplog.records[0].mark == 7  # type: ignore[attr-defined]
    assert caplog.records[2].exc_info is not None and caplog.records[2].name == "lines"
