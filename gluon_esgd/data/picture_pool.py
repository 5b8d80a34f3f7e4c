"""Pictures read by several processes, in the order in which they are asked for.

Processes, since MXNet decodes in one thread; started anew, not forked, since MXNet has threads.
A picture at which the decoder crashes thus is a broken picture and no end of the whole.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import Any, Deque, Dict, Iterable, Iterator, List, Optional, Tuple

from .picture import Read

__all__ = ["PicturePool"]

_START_S = 120.0
_END_S = 10.0  # for what was killed, or has closed its connection
_PICTURE_S = 120.0  # for one, however large and however slow the disk


class _Ended(Exception):
    """The process has ended or does not answer."""


class PicturePool:
    """Processes that read pictures; a context manager that ends them.

    Parameters
    ----------
    workers : int
        How many, at most.
    resize, quality : int
        See `read_picture`.
    """

    def __init__(self, workers: int, resize: Optional[int], quality: int) -> None:
        self._workers = workers
        self._numbers = resize or 0, quality
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all: List[_Process] = []
        self._closed = False
        self._threads = ThreadPoolExecutor(workers)

    def __enter__(self) -> PicturePool:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._closed = True
        for process in self._all:  # whoever waits for one sees its end
            process.kill()
        self._threads.shutdown()
        for process in self._all:
            process.close()

    def read(self, batches: Iterable[List[str]]) -> Iterator[Tuple[List[str], List[Read]]]:
        """Yield each list of paths with what became of its pictures, in order.

        Two lists for each process are under way at a time, or wait to be taken.

        Raises
        ------
        RuntimeError
            A process cannot be started; says what it wrote.
        """
        waiting: Deque[Tuple[List[str], Future[List[Read]]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, self._threads.submit(self._read, batch)))
                if len(waiting) >= 2 * self._workers:
                    paths, future = waiting.popleft()
                    yield paths, future.result()
            while waiting:
                paths, future = waiting.popleft()
                yield paths, future.result()
        finally:
            for _, future in waiting:
                future.cancel()

    def _read(self, paths: List[str]) -> List[Read]:
        if self._closed:
            raise _Ended("was ended")
        try:
            return self._ask(paths)
        except _Ended as ended:
            if len(paths) == 1 and not self._closed:
                return [Read(b"", f"no image: the process that decoded it {ended}")]
        return [read for path in paths for read in self._read([path])]

    def _ask(self, paths: List[str]) -> List[Read]:
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._start()
        answer = process.ask(paths)
        self._idle.put(process)
        return answer

    def _start(self) -> _Process:
        process = _Process(*self._numbers)
        self._all.append(process)
        if self._closed:  # too late for whoever ends them all
            process.kill()
        process.wait_for_start()
        return process


class _Process:
    """One process, in a session of its own: Ctrl-C is for us, and it ends with us."""

    def __init__(self, resize: int, quality: int) -> None:
        self._connection, theirs = Pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as we
        arguments = map(str, (theirs.fileno(), resize, quality))
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "gluon_esgd.data.picture_process", *arguments],
                pass_fds=[theirs.fileno()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,
            )

    def wait_for_start(self) -> None:
        try:
            self._receive(_START_S)
        except _Ended as ended:
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip()[-2000:]
            raise RuntimeError(f"a process to read pictures {ended}: {said}") from None

    def ask(self, paths: List[str]) -> List[Read]:
        try:
            self._connection.send(paths)
        except OSError:
            raise _Ended(self._end()) from None
        answer: List[Read] = self._receive(_PICTURE_S * len(paths))
        return answer

    def _receive(self, timeout_s: float) -> Any:
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (EOFError, OSError):
            raise _Ended(self._end()) from None
        self.kill()
        raise _Ended(f"said nothing for {timeout_s:g} s")

    def _end(self) -> str:
        """Say how it ended; it has closed its connection."""
        try:
            code = self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._popen.kill()

    def close(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_END_S)
        self._connection.close()
        self._said.close()


def _environment() -> Dict[str, str]:
    """One thread, no GPU, and no role in a job that this process may belong to."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_")}
    one = {"OMP_NUM_THREADS": "1", "MXNET_ENGINE_TYPE": "NaiveEngine"}
    return {**own, **one, "CUDA_VISIBLE_DEVICES": ""}
