"""docs/compatibility.md is what the tests of this folder assert."""

from __future__ import annotations

from ..pool import ROOT
from .behaviours import BEHAVIOURS
from .registry import DISTRIBUTED, MPI, SUMMED, Refused
from .table import CELLS, page
from .ways import WAYS


def test_the_page_is_what_the_tests_assert() -> None:
    committed = (ROOT / "docs" / "compatibility.md").read_text()
    assert committed == page(CELLS), (
        "write it anew: python -m tests.surface.table > docs/compatibility.md"
    )


def test_no_cell_is_blank_and_each_reason_is_there() -> None:
    text = page(CELLS)
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.count("|") == 10]
    cells = [cell.strip() for row in rows for cell in row[1:]]
    assert all(cells) and len(rows) > len(BEHAVIOURS)
    reasons = text.split("## Reasons")[1].split("##")[0].strip().splitlines()
    said = {cell.split("(")[1] for cell in cells if cell.endswith(")")}
    assert said == {f"{number})" for number in range(1, len(reasons) + 1)}


def test_a_cell_without_a_passed_test_says_so() -> None:
    cell = ("from_list", "mpi-esgd")
    assert page(CELLS).count("NOT TESTED") == 0
    (line,) = [line for line in page(CELLS - {cell}).splitlines() if "NOT TESTED" in line]
    assert line.startswith("| from a list | yes |") and line.endswith("| NOT TESTED |")


def test_exceptions_name_ways_that_there_are_once_each() -> None:
    names = [way.name for way in WAYS]
    assert set(MPI) | set(SUMMED) <= set(DISTRIBUTED) == set(names[1:])
    for behaviour in BEHAVIOURS.values():
        ways = [way for but in behaviour.but for way in but.ways]
        assert len(ways) == len(set(ways)) and set(ways) <= set(names), behaviour.name
        for but in behaviour.but:
            assert but.reason.endswith(".") and "|" not in but.reason
            assert not isinstance(but, Refused) or but.error
