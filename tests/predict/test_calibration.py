"""Constants come back from rows that were made with them; files are read or refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from gluon_esgd.predict import (
    Cluster,
    Configuration,
    Constants,
    Measurement,
    Work,
    calibrate,
    compare,
    predict,
    read_constants,
    read_measurements,
    write_measurements,
)

from .ideal import MB

TRUE = Constants(
    efficiency=0.81,
    latency_s=5e-3,
    server_bytes_per_s=90 * MB,
    duplex=0.4,
    pipelining=0.6,
    overhead_s=20e-3,
)
FITTED = (
    *("efficiency", "latency_s", "server_bytes_per_s"),
    *("duplex", "pipelining", "overhead_s"),
)


def row(configuration, hosts, link, parameter_bytes, constants=TRUE, factor=1.0):
    on = Cluster(hosts, 2, link, constants=constants)
    of = Work(parameter_bytes, 0.1)
    told = predict(of, on, configuration)
    bare = replace(on, constants=Constants())
    return Measurement(
        configuration, of, bare, factor * told.step_s, told.busiest_link_bytes or None
    )


def rows(noise=0.0, seed=1):
    """Of 1, 2 and 4 hosts, several rules and sizes, each off by so much."""
    draw, made = random.Random(seed), []
    for hosts in (1, 2, 4):
        workers = 2 * hosts
        for configuration in (
            Configuration("dist_sync", workers),
            Configuration("sgd", workers, workers),
            Configuration("sgd", workers),
            Configuration("esgd", workers, hosts, 1, 4),
            Configuration("asgd", workers, workers),
        ):
            for link, size in ((12.5 * MB, 5 * MB), (125 * MB, 25 * MB), (125 * MB, 0.1 * MB)):
                factor = math.exp(draw.gauss(0, noise)) if noise else 1.0
                made.append(row(configuration, hosts, link, size, factor=factor))
    return made


HELD_BACK = [
    row(Configuration(rule, 12, clients, servers), 6, link, 25 * MB)
    for rule, clients in (("dist_sync", 12), ("sgd", 2), ("esgd", 4), ("asgd", 3))
    for servers in (1, 4)
    for link in (12.5 * MB, 60 * MB)
]


def test_constants_come_back_from_noisy_rows():
    found = calibrate(rows(noise=0.03), fit=FITTED)
    for name in FITTED:
        wanted = pytest.approx(getattr(TRUE, name), rel=0.3)
        assert getattr(found.constants, name) == wanted, name
    assert found.constants.efficiency == pytest.approx(TRUE.efficiency, rel=0.05)
    assert found.largest_error < 0.15
    told = compare(HELD_BACK, found.constants)
    assert max(abs(residual.step_error) for residual in told) < 0.1
    guessed = compare(HELD_BACK)
    assert max(abs(residual.step_error) for residual in guessed) > 0.2


def test_rows_without_noise_are_explained():
    assert calibrate(rows(), fit=FITTED).largest_error < 0.02


def test_all_constants_may_be_fitted_at_once():
    told = compare(HELD_BACK, calibrate(rows(noise=0.03)).constants)
    assert max(abs(residual.step_error) for residual in told) < 0.15


def test_a_row_that_went_wrong_spoils_little():
    rings = [row(Configuration("sgd", 2 * n), n, 12.5 * MB, k * MB) for n in (2, 3, 4)
             for k in (25, 50, 100)]  # fmt: skip
    rings[0] = replace(rings[0], step_s=5 * rings[0].step_s)
    start = replace(TRUE, efficiency=0.5)
    found = calibrate(rings, start, ["efficiency"])
    assert found.constants.efficiency == pytest.approx(TRUE.efficiency, rel=0.04)


def test_a_row_that_went_wrong_spoils_little_among_many():
    spoiled = rows()
    spoiled[3] = replace(spoiled[3], step_s=5 * spoiled[3].step_s)
    found = calibrate(spoiled, fit=FITTED)
    assert found.constants.efficiency == pytest.approx(TRUE.efficiency, rel=0.05)
    told = compare(HELD_BACK, found.constants)
    assert max(abs(residual.step_error) for residual in told) < 0.1


def test_what_rows_say_nothing_of_stays():
    start = Constants(duplex=0.3, agent_bytes_per_s=7e8)
    only = [row(Configuration("sgd", 4), 2, link, 25 * MB) for link in (12.5 * MB, 25 * MB)]
    found = calibrate(only, start).constants
    assert (found.duplex, found.agent_bytes_per_s) == (0.3, 7e8)
    assert found.server_bytes_per_s == start.server_bytes_per_s


def test_what_is_not_to_be_fitted_stays():
    found = calibrate(rows(), fit=["efficiency"]).constants
    assert found == replace(Constants(), efficiency=found.efficiency) != Constants()


def test_calibration_is_put_on_a_cluster():
    found = calibrate(rows()[:3], fit=["overhead_s"])
    on = Cluster(4, 8, 1e9)
    assert found.on(on) == replace(on, constants=found.constants)


def test_rows_and_constants_are_read_back(tmp_path):
    written, path = rows(noise=0.1), str(tmp_path / "rows.json")
    write_measurements(path, written)
    assert read_measurements(path) == written
    found = calibrate(written[:4], fit=["efficiency"])
    found.write(str(tmp_path / "constants.json"))
    assert read_constants(str(tmp_path / "constants.json")) == found.constants
    assert json.loads((tmp_path / "constants.json").read_text())["rows"] == 4


def test_errors_are_relative_and_bytes_may_be_missing():
    measurement = replace(rows()[0], busiest_link_bytes=None)
    (residual,) = compare([measurement])
    assert residual.bytes_error is None
    assert residual.step_error == residual.predicted_s / measurement.step_s - 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ("[]", "is not of version 1 of gluon_esgd.predict"),
        ('{"version": 2}', "is not of version 1 of gluon_esgd.predict"),
        ('{"version": 1}', "has no 'constants'"),
        ('{"version": 1, "constants": {"speed": 1}}', "constants is not what was written"),
        ('{"version": 1, "constants": {"efficiency": 2}}', "efficiency 2 must be a number above 0"),
        ('{"version": 1, "constants": {"efficiency": "x"}}', "efficiency 'x' must be a number"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, said):
    path = tmp_path / "constants.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_constants(str(path))


@pytest.mark.parametrize(
    "change", [{"step_s": -1}, {"work": 3}, {"cluster": {}}, {"configuration": {}}]
)
def test_a_row_that_is_none_is_named(tmp_path, change):
    path = tmp_path / "rows.json"
    write_measurements(str(path), rows()[:2])
    document = json.loads(path.read_text())
    document["measurements"][1].update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="row 1 is not what was written"):
        read_measurements(str(path))


def test_there_must_be_something_to_fit():
    with pytest.raises(ValueError, match="measurements is empty"):
        calibrate([])
    with pytest.raises(ValueError, match="fit names speed, which Constants does not have"):
        calibrate(rows(), fit=["speed"])
    with pytest.raises(ValueError, match="step_s 0 must be a number above 0"):
        replace(rows()[0], step_s=0)
