"""What ranks reported in the folder of a job, cut and changed."""

from __future__ import annotations

import json

from gluon_esgd.launch.state import first_failed_rank, tail

from .mutation import Cases, bytes_, json_text, seeds

GOOD = {"host": "alpha", "time": 12.5, "pid": 7, "returncode": 3}


def test_any_report_of_a_rank_is_a_report_or_none(tmp_path):
    (tmp_path / "state").mkdir()
    path, log = tmp_path / "state" / "client0.rank1.exit", tmp_path / "log"
    cases = Cases()
    for seed, random in seeds(0, 200):
        record = dict(GOOD) if seed % 2 else {**GOOD, "signal": "SIGKILL", "returncode": -9}
        if seed % 3:
            data = json_text(random, record).encode(errors="surrogatepass")
        else:
            data = bytes_(random, json.dumps(record).encode(), b"\xff{[")
        path.write_bytes(data)
        log.write_bytes(data * 30)
        cases.ends_well(seed, data, lambda: _look(str(tmp_path), str(log)))
    assert cases.count == 200 and cases.refused == 0


def _look(folder, log):
    failed = first_failed_rank(folder)
    assert failed is None or (failed.text() and 0 < failed.code < 256)
    assert all(isinstance(line, str) for line in tail(log))
