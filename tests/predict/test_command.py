"""``gluon-esgd plan``: what it prints, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re
import shlex

import pytest

from gluon_esgd.cli import main
from gluon_esgd.launch.arguments import add_arguments, spec_from

from ..pool import ROOT

ISSUE = (
    "--model resnet50 --workers 12 --clients 2 --servers 2 --link 10g --compute-s 0.35 --hosts 6"
)
OPEN = "--parameters 25.6M --workers 12 --hosts 6 --link 1g --compute-s 0.35"


@pytest.fixture
def plan(capsys):
    """Return exit code, output and errors of the command."""

    def plan(line):
        code = main(["plan", *shlex.split(line)])
        return (code, *capsys.readouterr())

    return plan


def test_one_configuration_in_detail(plan):
    code, out, err = plan(f"{ISSUE} --interval 64")
    assert (code, err) == (0, "")
    assert out.startswith("A prediction with constants that are guesses, not a measurement")
    assert "resnet50_v1, 102.5 MB; 12 workers on 6 hosts, links of 10 Gbit/s" in out
    assert "rule esgd, 2 clients, 2 servers, interval 64, lazy 1" in out
    for word in ("step ", "epoch ", "exchange ", "busiest link   host 0", "bottleneck     compute"):
        assert f"  {word}" in out
    assert "*" not in out and "onvergence" not in out


def test_the_page_shows_what_it_prints(plan):
    text = (ROOT / "docs" / "predict.md").read_text()
    line, printed = re.search(
        r"^gluon-esgd plan (.*)\n```\n\n```\n(.*?)^```", text, re.M | re.S
    ).groups()
    assert plan(line)[1] == printed


def test_a_table_of_clients_and_intervals_with_the_best_marked(plan):
    code, out, _ = plan(OPEN)
    assert code == 0
    assert re.search(
        r"^  clients  interval +lazy +step +epoch  busiest link  bottleneck$", out, re.M
    )
    (best,) = re.findall(r"^\* +(\d+) +(\d+) +(\d+) ", out, re.M)
    assert "Convergence also matters" in out and "docs/choosing.md" in out
    assert f"{best[0]} clients, 1 server, interval {best[1]}, lazy {best[2]}" in out


def test_json_has_all_rows_and_says_what_it_is(plan):
    code, out, _ = plan(f"{OPEN} --json")
    told = json.loads(out)
    assert code == 0 and told["what"] == "a prediction, not a measurement"
    choices = told["choices"]
    assert len(choices) == 1 + 5 * 9
    assert sum(choice["is_best"] for choice in choices) == 1
    steps = [choice["step_s"] for choice in choices]
    assert steps == sorted(steps)
    assert choices[0].keys() > {"epoch_s", "busiest_link_bytes", "bottleneck", "parts", "busy_s"}


@pytest.mark.parametrize("more", ["", "--rule sgd", "--compression fp16", "--link 100g"])
def test_the_command_that_it_names_starts_such_a_job(plan, more):
    _, out, _ = plan(f"{OPEN} {more}")
    (line,) = re.findall(r"^  start it with  gluon-esgd run (.*)$", out, re.M)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    spec = spec_from(parser.parse_args([*shlex.split(line), "--dry-run", "true"]))
    (best,) = re.findall(r"^\* +(\d+) ", out, re.M)
    assert (spec.workers, spec.clients) == (12, int(best))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--rule dist_sync", "rule dist_sync, 12 clients, 1 server\n"),
        ("--rule sgd --clients 12", "rule sgd, 12 clients, 1 server\n"),
        ("--rule sgd --clients 1", "one client, pure MPI\n"),
        ("--clients 6 --interval 1", "exchange       5.33 s, every 9 steps: late, and put off"),
        ("--clients 2 --interval 8 --servers 0", "rule esgd, 2 clients, 0 servers, interval 8"),
        ("--rule sgd --clients 2 --server-link 100m", "busiest link   server host 0"),
        ("--rule sgd --clients 1 --hosts-per-rack 3 --uplink 100m", "busiest link   rack 0"),
        ("--rule sgd --clients 1 --latency-us 1e6", "bottleneck     latency"),
        ("--rule sgd --clients 1 --hosts 1", "none: nothing leaves a host"),
        (
            "--rule sgd --clients 1 --samples 12 --batch-size 1",
            "epoch          1.62 s, 7 samples/s",
        ),
        ("--rule dist_sync --cores 2 --link 100g", "shared cores"),
    ],
)
def test_other_configurations(plan, flags, said):
    code, out, err = plan(f"{OPEN} {flags}")
    assert code == 0, err
    assert said in out


def test_fitted_constants_are_used(plan, tmp_path):
    path = tmp_path / "constants.json"
    path.write_text('{"version": 1, "constants": {"overhead_s": 100.0}}')
    code, out, _ = plan(f"{ISSUE} --interval 64 --calibration {path}")
    assert code == 0 and "fixed 1.7 min" in out
    assert out.startswith("A prediction with fitted constants, not a measurement")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "--workers is missing: give an integer from 1 to 100000"),
        ("", "--link is missing: give bits a second, as 100m, 1g or 2.5g"),
        ("", "--compute-s is missing: give seconds from 1e-9 to 1e9"),
        ("", "--model and --parameters: give one of them"),
        (f"{OPEN} --model vgg16", "--model and --parameters: give one of them"),
        (f"{ISSUE} --model gpt5", "--model 'gpt5' must be one of alexnet, "),
        (f"{ISSUE} --workers 0", "--workers '0' must be an integer from 1 to 100000"),
        (f"{ISSUE} --workers 1000000", "--workers '1000000' must be an integer from 1 to 100000"),
        (f"{ISSUE} --clients 5", "--clients 5 must divide --workers 12: one of 1, 2, 3, 4, 6, 12"),
        (f"{ISSUE} --hosts 13", "--hosts 13 must be at most --workers 12"),
        (f"{ISSUE} --link fast", "--link 'fast' must be bits a second, as 100m, 1g or 2.5g"),
        (f"{ISSUE} --link 0g", "--link '0g' must be bits a second"),
        (f"{ISSUE} --link -1g", "argument --link: expected one argument"),
        (f"{ISSUE} --server-link x", "--server-link 'x' must be bits a second"),
        (f"{ISSUE} --uplink 1g", "--hosts-per-rack and --uplink: give both or none"),
        (f"{ISSUE} --compute-s nan", "--compute-s 'nan' must be seconds from 1e-9 to 1e9"),
        (f"{ISSUE} --compute-s 0", "--compute-s '0' must be seconds from 1e-9 to 1e9"),
        (f"{ISSUE} --rule adam", "--rule 'adam' must be one of sgd, asgd, esgd, dist_sync"),
        (f"{ISSUE} --rule dist_sync", "--rule dist_sync has as many clients as workers"),
        (f"{ISSUE} --rule sgd --interval 4", "--interval 4 must be 1, or left out, under --rule"),
        (f"{ISSUE} --rule asgd --servers 0", "--servers 0 must be at least 1 under --rule asgd"),
        (f"{ISSUE} --interval 4 --lazy 5", "--lazy 5 must not be above --interval 4"),
        (f"{ISSUE} --interval 1.5", "--interval '1.5' must be an integer of at least 1"),
        (f"{ISSUE} --batch-size 0", "--batch-size '0' must be an integer of at least 1"),
        (f"{ISSUE} --latency-us -1", "--latency-us '-1' must be microseconds of at least 0"),
        (f"{ISSUE} --compression fp8", "--compression 'fp8' must be fp16"),
        (f"{ISSUE} --calibration nowhere.json", "--calibration: 'nowhere.json' cannot be read"),
        (f"{OPEN} --parameters many", "--parameters 'many' must be a number of parameters, as 25"),
    ],
)
def test_a_flag_that_cannot_be_is_named(plan, flags, said, capsys):
    try:
        code, out, err = plan(flags)
    except SystemExit as end:  # argparse's own
        code, (out, err) = end.code, capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err, err


def test_all_faults_are_told_at_once(plan):
    _, _, err = plan("--workers x --link y --compute-s z")
    assert err.startswith("gluon-esgd plan: command line: 4 faults:")


@pytest.mark.parametrize("workers", [1000, 10_000])
def test_a_thousand_and_ten_thousand_workers(plan, workers):
    line = f"--model resnet50_v1 --workers {workers} --hosts {workers // 8} --servers 8 --link 100g"
    code, out, _ = plan(f"{line} --compute-s 0.35")
    assert code == 0 and "A prediction" in out
    assert f"{workers} workers on {workers // 8} hosts" in out
