"""Commands that the documentation shows can be given, and its first script runs."""

import argparse
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from gluon_esgd import cli
from gluon_esgd.launch.arguments import spec_from
from gluon_esgd.launch.hosts import read_hostfile

from .pool import ROOT
from .test_docs import PAGES, blocks

DOCS = ROOT / "docs"
# What batch systems say, as the scripts of docs/clusters.md put it together.
HOSTS = "alpha:4,beta:4,gamma:4,delta:4"


def _commands():
    """(page, words) of each call of `gluon-esgd` in a block of shell."""
    for page in PAGES:
        for block in [*blocks(page, "sh"), *blocks(page, "")]:
            text = block.replace("\\\n", " ").replace('"$hosts"', HOSTS)
            for line in re.findall(r"^(?:exec )?(?:\w+=\S+ )*(gluon-esgd .*)", text, re.M):
                if "..." not in line:
                    yield page.name, shlex.split(line, comments=True)[1:]


COMMANDS = list(_commands())


class Parsed(Exception):
    """Carries what was parsed out of the command, which so does nothing."""


@pytest.fixture
def parse(monkeypatch):
    """Return the options of a command."""
    real = argparse.ArgumentParser.parse_args

    def only(self, argv=None, namespace=None):
        raise Parsed(real(self, argv, namespace))

    def parse(argv):
        with monkeypatch.context() as patch, pytest.raises(Parsed) as found:
            patch.setattr(argparse.ArgumentParser, "parse_args", only)
            cli.main(argv)
        return found.value.args[0]

    return parse


def _spec(options):
    """Check a `run` for this machine: hosts are not asked for, programs need not be there."""
    options.dry_run, options.command = True, [sys.executable, *options.command[1:]]
    options.resume = None
    return spec_from(options)


def test_there_are_commands_on_many_pages():
    assert len(COMMANDS) > 15
    assert len({page for page, _ in COMMANDS}) > 5


@pytest.mark.parametrize(
    "page, argv", COMMANDS, ids=[f"{p} {' '.join(a)[:50]}" for p, a in COMMANDS]
)
def test_commands_are_those_of_the_parser(page, argv, parse, tmp_path):
    options = parse(argv)
    if argv[0] == "run":
        assert options.command, page
        if options.hostfile:
            options.hostfile = tmp_path / "hosts"
            options.hostfile.write_text("alpha slots=2\nbeta slots=2\n")
        _spec(options)


def test_the_mpijob_is_one_that_the_launcher_can_run(parse, tmp_path):
    (text,) = blocks(DOCS / "clusters.md", "yaml")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    pod = launcher["template"]["spec"]
    (container,) = pod["containers"]
    options = parse([*container["command"], *container["args"]][1:])
    assert options.hostfile == "/etc/mpi/hostfile"
    slots = job["spec"]["slotsPerWorker"]
    names = [f"train-worker-{k}.train.default.svc" for k in range(worker["replicas"])]
    for form in ("{} slots={}\n", "{}:{}\n"):  # Open MPI's, MPICH's
        options.hostfile = tmp_path / "hostfile"
        options.hostfile.write_text("".join(form.format(name, slots) for name in names))
        assert len(read_hostfile(options.hostfile)) == 4
        spec = _spec(options)
        assert (spec.workers, spec.clients, spec.client_size) == (16, 4, 4)
        assert spec.grace_s < pod["terminationGracePeriodSeconds"]
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    mounts = {
        m["name"]: m["mountPath"]
        for m in worker["template"]["spec"]["containers"][0]["volumeMounts"]
    }
    assert volumes == set(mounts) and mounts["shm"] == "/dev/shm"


@pytest.fixture(scope="module")
def start():
    """The script of docs/start.md, as it is after each of the page's changes."""
    page = DOCS / "start.md"
    (script,) = blocks(page, "python")
    versions = [script]
    for diff in blocks(page, "diff"):
        for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
            lines = hunk.splitlines()
            before, after = (
                "".join(line[1:] + "\n" for line in lines if line[:1] != sign) for sign in "+-"
            )
            assert script.count(before) == 1, before
            script = script.replace(before, after)
        versions.append(script)
    assert len(versions) == 3
    return versions


def _says(argv, script, folder):
    """What the script, made short, says of itself when it is run so."""
    path = folder / "train.py"
    path.write_text(script.replace("range(10)", "range(1)").replace("8192", "1024"))
    done = subprocess.run(
        [*argv, sys.executable, str(path)], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"^(\S+)% of 2,000 points$", done.stdout, re.M)


def test_the_script_runs_with_plain_gluon(start, tmp_path):
    assert "esgd" not in start[0]
    assert len(_says([], start[0], tmp_path)) == 1


@pytest.mark.mpi
@pytest.mark.servers
def test_the_script_runs_on_two_hosts_with_curves(start, tmp_path):
    shell = tmp_path / "here.sh"
    shell.write_text(next(b for b in blocks(DOCS / "start.md", "sh") if b.startswith("#!")))
    shell.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    (line,) = [argv for page, argv in COMMANDS if page == "start.md" and "./here.sh" in argv]
    argv = [sys.executable, "-m", "gluon_esgd.cli", *line[: line.index("python")]]
    assert len(_says(argv, start[2], tmp_path)) == 1
    curves = sorted(path.parent.name for path in tmp_path.glob("runs/*/events*"))
    assert curves == ["client0", "client1"]
