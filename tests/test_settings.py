"""What the environment says is read once, checked whole, and written back alike."""

from __future__ import annotations

from dataclasses import fields

import pytest

from gluon_esgd.errors import SettingsError, raise_faults
from gluon_esgd.settings import PREFIX, Settings, read, table


def test_nothing_set_gives_the_defaults() -> None:
    assert read({}) == Settings()
    assert Settings().environment() == {}


def test_what_is_written_is_read_back() -> None:
    made = Settings(
        job_dir="/tmp/job",
        client=1,
        num_clients=3,
        client_size=4,
        num_servers=2,
        scheduler="127.0.0.1:9000",
        places="0/4;1/4",
        rule="esgd",
        interval=8,
        alpha=0.25,
        lazy=2,
        compression="fp16",
        bucket_bytes=1 << 20,
        stall_abort_s=600.0,
    )
    assert read(made.environment()) == made


def test_off_means_no_limit() -> None:
    assert read({PREFIX + "STALL_ABORT_S": "off"}).stall_abort_s is None


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("CLIENT", "-1", "an integer of at least 0"),
        ("NUM_CLIENTS", "two", "an integer of at least 1"),
        ("RULE", "easgd", "one of sgd, asgd, esgd"),
        ("COMPRESSION", "2bit", "one of fp16"),
        ("ALPHA", "1.5", "a number of at least 0, 1 at most"),
        ("ALPHA", "nan", "a number of at least 0"),
        ("SCHEDULER", "localhost", "host:port"),
        ("SCHEDULER", "localhost:99999", "host:port"),
        ("PLACES", "2/2", "place/workers"),
        ("STALL_ABORT_S", "0", "a number of seconds above 0"),
        ("STALL_ABORT_S", "1e400", "a number of seconds above 0, 1000000 at most"),
        ("CENTER_LIMIT_S", "inf", "a number of seconds above 0, 1000000 at most"),
        ("CENTER_WAIT_S", "nan", "a number of seconds of at least 0, 1000000 at most"),
        ("BETA", "inf", "a number of at least 0"),
        ("JOB_DIR", "", "a text that is not empty"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError, match=f"{PREFIX}{name}='{value}' must be {allowed}"):
        read({PREFIX + name: value})


WAITS = sorted(f.name.upper() for f in fields(Settings) if f.name.endswith("_s"))


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-0", "-0.0", "1e400", "1e10", "-1", "1s"])
def test_every_wait_has_a_limit(name: str, value: str) -> None:
    allowed = "a number of seconds (above|of at least) 0, 1000000 at most"
    if name in ("STALL_ABORT_S", "CENTER_SNAPSHOT_S"):
        allowed += ', or "off" for no limit'
    with pytest.raises(SettingsError, match=f"{PREFIX}{name}='{value}' must be {allowed}$"):
        read({PREFIX + name: value})
    assert getattr(read({PREFIX + name: "1000000"}), name.lower()) == 1e6


def test_all_faults_come_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        read({PREFIX + "CLIENT": "x", PREFIX + "LAZY": "-2", PREFIX + "LAZZY": "1", "OTHER": "?"})
    text = str(caught.value)
    assert "3 faults" in text and "LAZZY is not a setting" in text and "OTHER" not in text


@pytest.mark.parametrize(
    "name, nearest",
    [("LAZZY", "LAZY"), ("BUKET_BYTES", "BUCKET_BYTES"), ("STALL_ABORT", "STALL_ABORT_S")],
)
def test_the_nearest_name_comes_first(name: str, nearest: str) -> None:
    said = f"{PREFIX}{name} is not a setting; nearest is {PREFIX}{nearest}; known are {PREFIX}ALG"
    with pytest.raises(SettingsError, match=said):
        read({PREFIX + name: "1"})


def test_what_is_near_no_name_has_no_nearest() -> None:
    with pytest.raises(SettingsError, match="QQQ is not a setting; known are"):
        read({PREFIX + "QQQ": "1"})


def test_no_fault_raises_nothing() -> None:
    raise_faults("nothing", [])


def test_the_table_has_every_setting() -> None:
    for f in fields(Settings):
        assert f"`{PREFIX}{f.name.upper()}`" in table()
