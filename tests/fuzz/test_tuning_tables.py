"""The table of ``gluon-esgd tune``."""

from __future__ import annotations

import json

from gluon_esgd.collectives.tuning import load
from gluon_esgd.tune.results import merge

from .mutation import Cases, bytes_, json_text, seeds

GOOD = {
    "version": 1,
    "choices": {
        "1x2": {"allreduce": [[65536, "library"], [None, "shared"]], "broadcast": [[99, "ring"]]},
        "2x4": {"allreduce": [[65536, "library"], [1 << 20, "ring"], [None, "hierarchical"]]},
    },
    "measured": {"1x2": {"ranks": 2, "microseconds": {"allreduce": {"1024": {"ring": 5.0}}}}},
}


def test_any_table_is_read_or_refused_with_the_place(tmp_path):
    cases, path = Cases(), tmp_path / "tuning.json"
    new = {"choices": {"1x8": {}}, "measured": {}}
    good = json.dumps(GOOD).encode()
    for seed, random in seeds(0, 400):
        if seed % 3:
            data = json_text(random, GOOD).encode(errors="surrogatepass")
        else:
            data = bytes_(random, good, good)
        path.write_bytes(data)
        cases.ends_well(
            seed, data, lambda: _used(load(str(path))[0]), ["version", "choices", "JSON", "deep"]
        )
        cases.ends_well(seed, data, lambda: json.dumps(merge(str(path), new)))
    assert cases.count == 800 and cases.refused > 150


def _used(table):
    for shape in ((1, 2), (1, 3), (2, 4), (9, 9)):
        for nbytes in (4, 65536, 1 << 40):
            assert table.choose("allreduce", nbytes, shape) in (
                None, "library", "shared", "ring", "hierarchical"
            )  # fmt: skip
