"""What clients state of themselves, and the table of all of them, which the servers hold."""

from __future__ import annotations

import numpy as np

from gluon_esgd.center import contract as contracts

from .mutation import NUMBERS, TEXTS, Cases, seeds, value

GOOD = {"interval": 16, "rule": 2, "num_parameters": 4, "shapes (checksum)": 123456}


def test_any_contract_is_taken_whole_or_refused():
    cases = Cases(TypeError)
    for seed, random in seeds(0, 300):
        given = dict(GOOD)
        for _ in range(random.choice((1, 2, 70))):
            name = random.choice((*TEXTS, *GOOD, 5, None, str(random.random())))
            given[name] = random.choice((value(random), np.int64(5), np.float32(2), 7, -3))
        cases.ends_well(seed, given, lambda g=given: _stated(g), ["contract"])
    assert cases.count == 300 and cases.refused > 200


def _stated(given):
    contracts.check_contract(given, 4)
    row = contracts.row({**given, **contracts.own_contract([4], [(0, 4)])}, seeder=True)
    assert np.isfinite(row).all() and row.shape == (contracts.WIDTH,)
    table = np.array([row])
    assert contracts.faults(table, given) == []


def test_any_table_gives_sentences():
    cases = Cases()
    for seed, random in seeds(1000, 300):
        rows = [contracts.row(GOOD, seeder=i == 0) for i in range(3)]
        table = np.array(rows, np.float32)
        for _ in range(random.choice((1, 1, 5, 50))):
            number = np.float32(min(float(random.choice(NUMBERS)), 1e38))
            table[random.randrange(3), random.randrange(30)] = number
        same = bool((table == np.array(rows, np.float32)).all())
        cases.ends_well(seed, table, lambda t=table, s=same: _sentences(t, s))
    assert cases.count == 300


def _sentences(table, same):
    found = contracts.faults(table, GOOD)
    assert all(isinstance(text, str) and text for text in found)
    assert not (same and found)


def test_any_text_has_a_checksum():
    for text in TEXTS:
        assert 0 <= contracts.checksum(text) < contracts.LIMIT
