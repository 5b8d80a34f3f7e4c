"""``gluon-esgd doctor``: can this machine run a job, and what to do where it cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Tuple

from ..errors import LaunchError
from . import mpi

__all__ = ["Finding", "add_command", "examine", "facts_in", "main"]

_GB = 1 << 30
_SHM_BYTES = 256 << 20  # gradients of a node's ranks lie there, next to MPI's own files
_PYTHON = ((3, 8), (3, 11))

Fact = Dict[str, Any]
Probe = Callable[[str], Fact]


@dataclass(frozen=True)
class Finding:
    """One line of the report: "OK", "WARN" or "FAIL", what was looked at, what to do."""

    level: str
    what: str
    remedy: str = ""

    def text(self) -> str:
        """Return the line."""
        return f"{self.level:4}  {self.what}" + (f"\n      -> {self.remedy}" if self.remedy else "")


# Each prints a dictionary. In a process of its own, so that a crash is only a finding.
_PROBES = {
    "numpy": "import numpy; say(version=numpy.__version__)",
    "mxnet": "import mxnet; f = mxnet.runtime.Features(); "
    "say(version=mxnet.__version__, dist=f.is_enabled('DIST_KVSTORE'), cuda=f.is_enabled('CUDA'))",
    "mpi4py": "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "say(version=mpi4py.__version__, library=MPI.Get_library_version())",
    "cupy": "import cupy; say(version=cupy.__version__, gpus=cupy.cuda.runtime.getDeviceCount())",
    "tqdm": "import tqdm; say(version=tqdm.__version__)",
    "tensorboardX": "import tensorboardX; say(version=tensorboardX.__version__)",
}
_SAY = "import json, warnings; warnings.simplefilter('ignore')\n"
_SAY += "def say(**facts): print('\\n' + json.dumps(facts))\n"


def probe(name: str) -> Fact:
    """Return what a module says of itself, or ``{"error": ...}`` when it does not load."""
    command = [sys.executable, "-c", _SAY + _PROBES[name]]
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("DMLC_", "PS_"))}
    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, timeout=120, **_CAPTURE
        )
    except subprocess.TimeoutExpired:
        return {"error": "import took more than 120 s"}
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return {"error": lines[-1] if lines else f"ended with {done.returncode}"}
    return facts_in(done.stdout)


def facts_in(stdout: bytes) -> Fact:
    """Return the facts on the last line that a probe printed, or ``{"error": ...}``."""
    try:
        facts = json.loads(stdout.decode().strip().splitlines()[-1])
    except (IndexError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not isinstance(facts.get("version"), str):
        return {"error": "import printed what is no version"}
    return facts


_CAPTURE: Dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def examine(probe: Probe = probe) -> Iterator[Finding]:
    """Look at everything that a job needs; yields a `Finding` for each.

    Parameters
    ----------
    probe : callable
        Gives the facts of a module by its name.
    """
    yield _python()
    yield _numpy(probe("numpy"))
    mxnet = probe("mxnet")
    yield _mxnet(mxnet)
    yield from _mpi(probe("mpi4py"))
    yield _cores()
    yield _memory()
    yield _shared_memory()
    yield from _gpus(mxnet, probe)
    for name in ("tqdm", "tensorboardX"):
        yield _helper(name, probe(name))


def _python(version: Tuple[int, int] = sys.version_info[:2]) -> Finding:
    what = f"Python {version[0]}.{version[1]} at {sys.executable}"
    if _PYTHON[0] <= version <= _PYTHON[1]:
        return Finding("OK", what)
    return Finding("FAIL", what, "MXNet 1.9.1 needs 3.8 to 3.11: make a virtualenv with one")


def _numbers(version: str) -> List[int]:
    return [int(part) for part in version.split(".")[:2] if part.isdigit()]


def _numpy(facts: Fact) -> Finding:
    if "error" in facts:
        return Finding("FAIL", f"numpy: {facts['error']}", "pip install 'numpy<1.24'")
    what = f"numpy {facts['version']}"
    if _numbers(facts["version"]) < [1, 24]:
        return Finding("OK", what)
    return Finding("FAIL", what, "MXNet 1.9.1 uses numpy.bool: pip install 'numpy<1.24'")


def _mxnet(facts: Fact) -> Finding:
    remedy = "pip install mxnet==1.9.1 'numpy<1.24'"
    if "error" in facts:
        return Finding("FAIL", f"MXNet: {facts['error']}", remedy)
    if facts["version"] != "1.9.1":
        return Finding("FAIL", f"MXNet {facts['version']}, not 1.9.1", remedy)
    if not facts["dist"]:
        return Finding("FAIL", "MXNet 1.9.1 built without DIST_KVSTORE: no servers", remedy)
    return Finding("OK", "MXNet 1.9.1 with DIST_KVSTORE")


def _mpi(facts: Fact) -> Iterator[Finding]:
    loaded = _loaded_mpi(facts)
    yield loaded
    try:
        found = mpi.find()
    except LaunchError as error:
        yield Finding("WARN", "mpiexec", f"{error}; clients of one rank work without")
        return
    name = {"mpich": "MPICH", "openmpi": "Open MPI"}[found.vendor]
    what = f"mpiexec: {name} {found.version} at {found.mpiexec}"
    if loaded.level == "OK" and name not in facts["library"]:
        remedy = f"mpi4py binds another MPI: keep one of the wheels, or give --mpiexec; use {name}"
        yield Finding("FAIL", what, remedy)
    else:
        yield Finding("OK", what)


def _loaded_mpi(facts: Fact) -> Finding:
    if "error" in facts:
        return Finding("FAIL", f"mpi4py: {facts['error']}", "pip install 'mpi4py>=4,<5' mpich")
    library = " ".join(facts["library"].split("\n")[0].replace("\t", " ").split())[:60]
    return Finding("OK", f"mpi4py {facts['version']} binds {library}")


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count > 1:
        return Finding("OK", f"{count} cores")
    return Finding("WARN", "1 core", "ranks will share it; use --hosts for more machines")


def _memory() -> Finding:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GB
    if size >= 2:
        return Finding("OK", f"{size:.1f} GB of memory")
    return Finding("WARN", f"{size:.1f} GB of memory", "each rank takes 0.3 GB and its network")


def _shared_memory(path: str = "/dev/shm") -> Finding:
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding("FAIL", f"{path}: {error.strerror}", "mount a tmpfs there")
    what = f"{path}: {free / _GB:.2f} GB free"
    if free >= _SHM_BYTES:
        return Finding("OK", what)
    return Finding("WARN", what, "MPI and the ranks share memory there: docker run --shm-size=1g")


def _gpus(mxnet: Fact, probe: Probe) -> Iterator[Finding]:
    names = _gpu_names()
    if not names:
        yield Finding("OK", "no GPU: jobs run on the CPU")
        return
    what = f"{len(names)} GPU(s): {names[0]}"
    if mxnet.get("cuda"):
        yield Finding("OK", what)
    else:
        yield Finding("WARN", what, "this MXNet has no CUDA: pip install mxnet-cu112==1.9.1")
    cupy = probe("cupy")
    if "error" in cupy:
        yield Finding("WARN", f"CuPy: {cupy['error']}", "pip install 'gluon-esgd[cuda]'")
    else:
        yield Finding("OK", f"CuPy {cupy['version']} sees {cupy['gpus']} GPU(s)")


def _gpu_names() -> List[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, timeout=30, **_CAPTURE)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.decode().splitlines() if done.returncode == 0 else []


def _helper(name: str, facts: Fact) -> Finding:
    if "error" in facts:
        return Finding("WARN", f"{name}: {facts['error']}", f"pip install {name}")
    return Finding("OK", f"{name} {facts['version']}")


def main() -> int:
    """Print all findings; return 1 when something that is needed fails, else 0."""
    worst = 0
    for finding in examine():
        print(finding.text(), flush=True)
        worst = max(worst, finding.level == "FAIL")
    return int(worst)


def add_command(commands: Any) -> None:
    """Add ``doctor`` to the subcommands of ``gluon-esgd``."""
    text = "Check Python, MXNet, MPI, cores and GPUs, and say what to do."
    commands.add_parser("doctor", help="check this machine", description=text).set_defaults(
        go=lambda options: main()
    )
