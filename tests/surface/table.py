"""docs/compatibility.md: what the tests of this folder come to.

``python -m tests.surface.table > docs/compatibility.md`` runs them all and prints the page; where
one fails it prints none. `test_table` holds the page in the repository to what the tests expect.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Set, Tuple

import pytest

from .behaviours import BEHAVIOURS
from .registry import Behaviour, Refused
from .ways import WAYS

__all__ = ["CELLS", "page"]

Cell = Tuple[str, str]  # names of a behaviour and of a way

#: Every cell of the table.
CELLS = {(name, way.name) for name in BEHAVIOURS for way in WAYS}

_FRAME = (Path(__file__).parent / "frame.md").read_text()


def page(tested: Set[Cell]) -> str:
    """Return the page; a cell whose test has not passed says so."""
    reasons: Dict[str, int] = {}
    by_theme: Dict[str, List[Behaviour]] = {}
    for behaviour in BEHAVIOURS.values():
        by_theme.setdefault(behaviour.theme, []).append(behaviour)
    tables = [
        f"## {theme}\n\n" + _table([_row(b, tested, reasons) for b in behaviours])
        for theme, behaviours in by_theme.items()
    ]
    why = "".join(f"{number}. {reason}\n" for reason, number in reasons.items())
    return _FRAME.format(tables="\n".join(tables), reasons=why)


def _row(behaviour: Behaviour, tested: Set[Cell], reasons: Dict[str, int]) -> List[str]:
    cells = [behaviour.title]
    for way in WAYS:
        but = behaviour.exception(way.name)
        if (behaviour.name, way.name) not in tested:
            cells.append("NOT TESTED")
        elif but is None:
            cells.append("yes")
        else:
            number = reasons.setdefault(but.reason, len(reasons) + 1)
            cells.append(f"{'no' if isinstance(but, Refused) else 'differs'} ({number})")
    return cells


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = ["", *(way.name for way in WAYS)]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class _Record:
    """A pytest plugin that keeps which cells have passed."""

    def __init__(self) -> None:
        self.tested: Set[Cell] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        said: Mapping[str, Any] = dict(report.user_properties)
        if report.when == "call" and report.passed and "cell" in said:
            self.tested.add(said["cell"])


def _main() -> int:
    record = _Record()
    tests = str(Path(__file__).with_name("test_behaviours.py"))
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main([tests, "-q"], plugins=[record])
    missing = sorted(CELLS - record.tested)
    if status != 0 or missing:
        print(f"no page: {len(missing)} of {len(CELLS)} did not pass", missing, file=sys.stderr)
        return 1
    print(page(record.tested), end="")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
