"""The stations of a job as the launcher runs them: their processes, what they say and are told."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence

from . import words
from .child import Child
from .generations import Generations
from .plan import Process, socket_path
from .state import Failure
from .terms import Outside, Terms

__all__ = ["Stations"]

_SOON_S = 5.0  # a station that lives no longer has not done its work
_MOST_SOON = 3
_MOST_UNREAD = 64 << 20  # bytes that a station has not taken

Message = Dict[str, Any]


@dataclass
class _Station:
    """One station: its process, life after life, and the bytes on their way."""

    process: Process
    child: Child
    since: float
    came_up: bool = False
    ended_soon: int = 0
    incoming: bytes = b""
    outgoing: bytearray = field(default_factory=bytearray)


class Stations:
    """Starts a station on each host that needs one, and keeps the generations going.

    Parameters
    ----------
    terms : Terms
        Of the job.
    processes : sequence of Process
        The stations.
    leaders_at : sequence of int
        For each client the number of the host of its leader.
    job_dir : str
        Folder of the job.
    start : callable
        Starts a process and returns the `Child`.
    drop : callable
        Called with a `Child` that has ended and is replaced.
    selector : selectors.BaseSelector
        Where descriptors are registered, each with what to call.
    fail : callable
        Gets the `Failure` of the job.
    """

    def __init__(
        self,
        terms: Terms,
        processes: Sequence[Process],
        leaders_at: Sequence[int],
        job_dir: str,
        start: Callable[[Process], Child],
        drop: Callable[[Child], None],
        selector: selectors.BaseSelector,
        fail: Callable[[Failure], None],
    ) -> None:
        self._terms, self._leaders_at, self._job_dir = terms, list(leaders_at), job_dir
        self._start, self._drop, self._selector, self._fail = start, drop, selector, fail
        self._outside = Outside(
            self._to_station, self._to_leader, self._failed, self._note, time.monotonic
        )
        self.generations = Generations(terms, self._outside)
        self._all: Dict[int, _Station] = {}
        self._over = False
        for process in processes:
            self._begin_station(process)

    def _begin_station(self, process: Process) -> None:
        assert process.station is not None
        child, now = self._start(process), time.monotonic()
        self._all[process.station] = station = _Station(process, child, now)
        self._open(station)

    def add_leader(self, process: Process) -> None:
        """Prepare for a further client, whose leader talks to this station; it may be new."""
        assert process.station is not None
        if process.station not in self._all:
            self._begin_station(process)
        self._leaders_at.append(process.station)

    def look(self) -> None:
        """See which stations have ended, and do what is due."""
        if self._over:
            return
        for number, station in self._all.items():
            if station.child.poll() is not None:
                self._replace(number, station)
        self.generations.settle()

    def begin_anew(self) -> None:
        """Forget generations and leaders: all clients are started again."""
        last = self.generations.last
        self.generations.end()
        for host in self._terms.stations:
            self._to_station(host, {"do": "end", "generation": last})
        joined = self.generations.joined
        self.generations = Generations(self._terms, self._outside, last)
        self.generations.joined = joined

    def end(self) -> None:
        """Follow the stations no more; they are about to be ended."""
        if self._over:
            return
        self._over = True
        self.generations.end()
        for station in self._all.values():
            station.outgoing.clear()
            self._forget(station.child.input)

    def close(self) -> None:
        """Give the descriptors back."""
        for station in self._all.values():
            self._close(station)

    # Processes.

    def _open(self, station: _Station) -> None:
        """Begin to talk to a station that was just started."""
        station.incoming = b""
        station.outgoing.clear()
        for fd in station.child.output:
            self._selector.register(fd, selectors.EVENT_READ, lambda: self._read(station))
        number = station.process.station
        assert number is not None
        self._to_station(number, self._begin(number))

    def _begin(self, number: int) -> Message:
        socket, logs = socket_path(self._job_dir, number), f"{self._job_dir}/logs"
        return {"do": "begin", "secret": self._terms.secret, "socket": socket, "logs": logs}

    def _replace(self, number: int, station: _Station) -> None:
        """Start a station that has ended once more, unless that does not help."""
        self._read(station)  # its last words
        failure = station.child.failure()
        lived = time.monotonic() - station.since
        station.ended_soon = station.ended_soon + 1 if lived < _SOON_S else 0
        if self._over:
            return
        if not station.came_up or station.ended_soon > _MOST_SOON:
            return self._fail(failure)
        self._say(f"{failure.who} {failure.how}; starting another")
        self._close(station)
        self._drop(station.child)
        station.child, station.since = self._start(station.process), time.monotonic()
        station.came_up = False
        self._open(station)
        self.generations.station_ended(number, f"{station.process.name} ended")

    def _close(self, station: _Station) -> None:
        for fd in (*station.child.output, station.child.input):
            self._forget(fd)

    def _forget(self, fd: Optional[int]) -> None:
        if fd is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)

    # What stations say.

    def _read(self, station: _Station) -> None:
        for fd in station.child.output:
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(fd, 1 << 16)
                if not chunk:
                    self._close(station)
                self._take(station, chunk)

    def _take(self, station: _Station, chunk: bytes) -> None:
        *lines, station.incoming = (station.incoming + chunk).split(b"\n")
        if len(station.incoming) > 2 * words.LONGEST:
            station.incoming = b""
        for line in lines:
            message = words.parse(line)
            if message is None:
                station.child.note(b"not understood by the launcher: %.200s\n" % line)
            elif not self._over:
                station.came_up = station.came_up or message["say"] == "up"
                assert station.process.station is not None
                self.generations.from_station(station.process.station, message)

    # What they are told.

    def _to_leader(self, client: int, message: Message) -> None:
        tell = {"do": "tell", "client": client, "message": message}
        self._to_station(self._leaders_at[client], tell)

    def _to_station(self, host: int, message: Message) -> None:
        station = self._all.get(host)
        if station is None:
            return
        station.outgoing += json.dumps(message).encode() + b"\n"
        if len(station.outgoing) > _MOST_UNREAD:
            return self._failed(f"{station.process.name} takes no more messages")
        self._write(station)

    def _write(self, station: _Station) -> None:
        fd = station.child.input
        if fd is None:
            return
        try:
            del station.outgoing[: os.write(fd, station.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            station.outgoing.clear()  # it has ended, which `look` sees
        known = fd in self._selector.get_map()
        if station.outgoing and not known:
            self._selector.register(fd, selectors.EVENT_WRITE, lambda: self._write(station))
        elif known and not station.outgoing:
            self._selector.unregister(fd)

    # What comes of it.

    def _failed(self, why: str) -> None:
        self._fail(Failure("the center", f"failed: {why}", 1, time.time(), self._log))

    @property
    def _log(self) -> Optional[str]:
        return next((station.process.log for station in self._all.values()), None)

    def _note(self, record: Message) -> None:
        """Tell of a hand-over, and keep the record."""
        source, lost = record["source"], record["lost"]
        center = "" if source is None else f"; center from client {source}"
        loss = f"; {lost}" if source is not None and lost else f"; lost: {lost}" if lost else ""
        said = f"generation {record['generation']}: {record['why']}{center}{loss}"
        if record["fault"] and record["generation"] > 1:
            self._say(f"{said}, {record['seconds']:.1f} s")
        path = Path(self._job_dir, "state", "generations.jsonl")
        try:
            with open(path, "a") as log:
                log.write(json.dumps({"time": time.time(), **record}) + "\n")
        except OSError as error:  # a disk that is full ends no job
            self._say(f"{path} was not written: {error.strerror}")

    @staticmethod
    def _say(text: str) -> None:
        print(f"gluon-esgd: {text}", file=sys.stderr, flush=True)
