"""Command lines of ``gluon-esgd run``, ``tune``, ``plan`` and ``doctor``; nothing is started."""

from __future__ import annotations

import argparse
import io
import json
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import pytest

from gluon_esgd import cli
from gluon_esgd.launch import arguments, doctor, faults, mpi
from gluon_esgd.launch.run import look_around
from gluon_esgd.launch.run import run as run_job
from gluon_esgd.tune import command as tune_command

from .mutation import NUMBERS, Cases, Refused, json_text, seeds, texts

RUN = [
    "run -n 4 --clients 2 --servers 1 --rule esgd --interval 16 --alpha 0.25 python train.py",
    "run -n 8 --hosts alpha:4,beta:4 --remote-shell ssh --env A=1 --env HOME python train.py",
    "run -n 4 --clients 4 --servers 0 --bind none --mpiexec /bin/true -- python train.py --lr 1",
    "run -n 2 --clients 2 --beta 0.9 --lazy 1 --port 9123 --job-dir jobs/a --start-timeout 9 true",
    "run -n 2 --compression fp16 --hostfile machines --dry-run true",
    "run -n 6 --clients 3 --max-restarts 3 --min-clients 2 --grace 9 --resume jobs python train.py",
]
TUNE = ["tune -n 2,4 --sizes 1K,64K,16M --time-limit 60 --output table.json --mpiexec /bin/true"]
PLAN = [
    "plan --model resnet50_v1 --workers 12 --clients 2 --servers 2 --link 10g --compute-s 0.35",
    "plan --parameters 25.6M --workers 12 --hosts 6 --link 2.5g --compute-s 1 --interval 64 --json",
    "plan --model vgg16 --workers 8 --link 1g --compute-s 1 --rule dist_sync --server-link 100m",
    "plan --model vgg16 --workers 8 --link 1g --compute-s 1 --hosts-per-rack 2 --uplink 1g",
]
DOCTOR = ["doctor", "doctor --help"]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    """Plan what would be run; names have no address but for those that cannot even be asked for."""

    def resolve(name):
        name.encode("idna")
        if "\0" in name:
            raise ValueError("embedded null character")
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "machines").write_text("alpha slots=4\nbeta:2\n")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(socket, "getfqdn", lambda: "here.example")
    monkeypatch.setattr(mpi, "_version_text", lambda path: "HYDRA build details: Version: 4.2")
    monkeypatch.setattr(faults, "_is_free", lambda port: True)
    monkeypatch.setattr(
        arguments, "run", lambda spec, output=1: run_job(replace(spec, dry_run=True))
    )
    monkeypatch.setattr(tune_command, "run", lambda spec, output=1: 3)
    monkeypatch.setattr(doctor, "main", lambda: 0)


def call(words):
    """Run the command line; its exit code must fit what it printed."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as end:
            helped = end.code == 0 and {"--help", "-h"} & {*words}
            assert helped or (end.code == 2 and "usage" in err.getvalue()), err.getvalue()
            raise Refused(err.getvalue() or out) from None
    out.flush()
    said = err.getvalue()
    if code == 2:
        assert said.startswith("gluon-esgd "), said
        for sign in ("Traceback", "codec", "invalid literal", "not enough values", "quotation"):
            assert sign not in said, said
        raise ValueError(said)
    assert code in (0, 3)
    return out.buffer.getvalue()


def changed(random, line):
    words = line.split()
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(1, len(words) + 1)
        how = random.randrange(6)
        if how == 0:
            words.insert(at, texts(random, random.choice(words)))
        elif how == 1 and at < len(words):
            del words[at]
        elif at < len(words):
            if how == 2:
                words[at] = repr(random.choice(NUMBERS))
            else:
                words[at] = texts(random, words[at])
    return [word.replace("\0", "") for word in words]


@pytest.mark.parametrize(
    ("lines", "first", "count"),
    [(RUN, 0, 700), (TUNE, 5000, 200), (PLAN, 6000, 300), (DOCTOR, 8000, 60)],
    ids=["run", "tune", "plan", "doctor"],
)  # fmt: skip
def test_any_command_line_is_planned_or_refused(lines, first, count):
    cases = Cases()
    for seed, random in seeds(first, count):
        words = changed(random, lines[seed % len(lines)])
        cases.ends_well(seed, words, lambda w=words: call(w))
    assert cases.count == count and cases.refused > count // 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("-n 1000000000000", "-n 1000000000000"),
        ("-n 100000 --clients 50000", "-n 100000"),
        ("-n 2 --clients 2 --servers 1000000000", "--servers 1000000000"),
        ("-n 2 --clients -5", "--clients -5"),
        ("--hosts a:99999999999", "a:99999999999"),
        ("-n 2 --hosts a:1,b:1 --remote-shell '", "--remote-shell"),
        *(
            (f"-n 2 {flag}={value}", f"{flag} {float(value):g} must be ")
            for flag in ("--start-timeout", "--center-snapshot", "--grace")
            for value in ("nan", "inf", "-0", "1e400", "1e10", "-1")
        ),
        ("-n 2 --clients 2 --alpha nan", "--alpha nan"),
        ("-n 2 --clients 2 --beta inf", "--beta inf"),
        ("-n 2 --hosts " + "a" * 300 + ":2", "--hosts"),
        ("-n 2 --hosts ..:1,x:1", "'..'"),
    ],
)
def test_what_is_out_of_all_bounds_is_named(flags, named):
    words = ["run", *flags.split(), "python", "train.py"]
    error = Cases().ends_well(0, words, lambda: call(words))
    assert error is not None and named in str(error), error


def test_a_command_with_bytes_that_are_no_text_can_be_shown():
    assert b"caf" in call(["run", "-n", "1", "--dry-run", sys.executable, "caf\udce9.py"])


def test_any_facts_of_a_probe_give_findings():
    cases = Cases()
    good = {"version": "1.9.1", "dist": True, "cuda": False, "library": "MPICH 4.2", "gpus": 1}
    for seed, random in seeds(9000, 200):
        facts = {name: dict(good) for name in doctor._PROBES}
        for name in random.sample(sorted(facts), 2):
            printed = json_text(random, good).encode(errors="replace")
            facts[name] = doctor.facts_in(random.choice((printed, b"", b"\xff\n", b"\n\n3\n")))
            if "error" not in facts[name]:  # a module says what it is; the rest is ours
                facts[name] = {**good, "version": facts[name]["version"]}
        cases.ends_well(seed, facts, lambda f=facts: _lines(f))
    assert cases.count == 200 and cases.refused == 0


def _lines(facts):
    assert all(finding.text() for finding in doctor.examine(facts.__getitem__))


def test_the_plan_of_the_largest_job_is_made_in_time():
    words = ["-n", str(faults.MOST_RANKS), "--clients", str(faults.MOST_RANKS // 2), "true"]
    parser = arguments._complete(argparse.ArgumentParser())
    assert not Cases().ends_well(0, words, lambda: _plan(parser.parse_args(words)))


def _plan(options):
    from gluon_esgd.launch.plan import plan

    spec = replace(arguments.spec_from(options), dry_run=True)
    assert len(json.dumps([p.name for p in plan(spec, look_around(spec, {}))])) > 1000
