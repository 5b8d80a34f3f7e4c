"""What the doctor says of healthy and of broken installations."""

import pytest

from gluon_esgd import cli
from gluon_esgd.launch import doctor

HEALTHY = {
    "numpy": {"version": "1.23.5"},
    "mxnet": {"version": "1.9.1", "dist": True, "cuda": False},
    "mpi4py": {"version": "4.0", "library": "MPICH Version: 5\nOpen MPI v5"},
    "tqdm": {"version": "4"},
    "tensorboardX": {"version": "2"},
}


def report(**changes):
    facts = {**HEALTHY, **changes}
    return list(doctor.examine(facts.__getitem__))


def test_a_healthy_machine_fails_nothing(monkeypatch):
    monkeypatch.setattr(doctor, "_gpu_names", list)
    assert "FAIL" not in {finding.level for finding in report()}


@pytest.mark.parametrize(
    ("name", "facts", "level", "says"),
    [
        ("numpy", {"version": "1.24.0"}, "FAIL", "numpy<1.24"),
        ("numpy", {"error": "no module"}, "FAIL", "numpy<1.24"),
        ("mxnet", {"error": "ended with -11"}, "FAIL", "mxnet==1.9.1"),
        ("mxnet", {"version": "1.6.0", "dist": True}, "FAIL", "mxnet==1.9.1"),
        ("mxnet", {"version": "1.9.1", "dist": False}, "FAIL", "mxnet==1.9.1"),
        ("mpi4py", {"error": "libmpi.so not found"}, "FAIL", "mpi4py"),
        ("mpi4py", {"version": "4.0", "library": "Other MPI"}, "FAIL", "mpi4py binds another MPI"),
        ("tqdm", {"error": "no module"}, "WARN", "pip install tqdm"),
    ],
)
def test_what_is_broken_comes_with_a_remedy(name, facts, level, says):
    assert any(f.level == level and says in f.remedy for f in report(**{name: facts}))


def test_gpus_without_cuda_are_pointed_out(monkeypatch):
    monkeypatch.setattr(doctor, "_gpu_names", lambda: ["H100", "H100"])
    found = report(cupy={"error": "no module"})
    assert any(f.level == "WARN" and "2 GPU(s): H100" in f.what for f in found)
    assert any(f.level == "WARN" and f.what.startswith("CuPy") for f in found)


@pytest.mark.parametrize(
    ("version", "level"), [((3, 7), "FAIL"), ((3, 8), "OK"), ((3, 12), "FAIL")]
)
def test_python_versions(version, level):
    assert doctor._python(version).level == level


def test_a_crash_in_a_module_is_survived(monkeypatch):
    monkeypatch.setitem(doctor._PROBES, "numpy", "import os; os.abort()")
    assert "ended with -6" in doctor.probe("numpy")["error"]


def test_a_missing_shared_memory_is_a_failure(tmp_path):
    assert doctor._shared_memory(str(tmp_path / "none")).level == "FAIL"


@pytest.mark.mpi
def test_the_command_reports_on_this_machine(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("OK    MXNet 1.9.1 with DIST_KVSTORE") for line in lines)


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    assert capsys.readouterr().out.count("    gluon-esgd run") == 3
