"""The station: a process on each host that has servers or leaders, between them and the launcher.

``python -m gluon_esgd.center.station`` takes JSON lines from the launcher on
standard input and answers on standard output. It begins and ends scheduler
and servers (`roles`), and passes on what launcher and leaders have for each
other (`dispatch`); leaders come to its Unix socket (`door`). One thread does
all of it and waits for nothing but the next event. At the end of standard
input or a SIGTERM it kills its roles and ends; they end with it, however it
ends. MXNet is loaded by its zygote, not here.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import signal
import sys
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

from .dispatch import Dispatcher, Message
from .door import LEADERS, Connection, Door
from .lines import Lines, encode, parse, text
from .roles import Roles

__all__ = ["Station", "main"]

_CHUNK = 1 << 16
_PAUSE = 1 << 20  # bytes that wait for the launcher; leaders are not read meanwhile

_log = logging.getLogger("gluon_esgd.center.station")

Watched = Tuple[int, int, Callable[[], None]]  # descriptor, poll's events, what to call


class _Opened:
    """What there is from the launcher's first line on."""

    def __init__(self, begin: Message, say: Callable[[Message], None]) -> None:
        if text(begin, "do") != "begin":
            raise ValueError("it comes before 'begin'")
        secret, path, logs = (text(begin, name) for name in ("secret", "socket", "logs"))
        if len(secret) != 64 or len(bytes.fromhex(secret)) != 32:
            raise ValueError("its 'secret' must be 64 hexadecimal digits")
        _log_to(logs)
        self.door = Door(path)
        self.roles = Roles(say, logs, secret)
        self.dispatcher = Dispatcher(say, self.roles)


class Station:
    """The event loop. It owns standard input and output and the signals of its process."""

    def __init__(self) -> None:
        self._out, self._lines = bytearray(), Lines()
        self._open: Optional[_Opened] = None
        self._leaders: List[Connection] = []
        self._over = False
        self._signals = _take_signals(signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        os.set_blocking(1, False)

    def run(self) -> None:
        """Serve until standard input ends or a signal says so."""
        try:
            while not self._over:
                self._wait()
                if self._open is not None:
                    self._open.roles.look()
                    self._sweep(self._open.dispatcher)
                self._flush()
        finally:
            self._close()

    def _wait(self) -> None:
        """Wait for the next events and act on them."""
        poll, actions = select.poll(), {}  # type: select.poll, dict[int, Callable[[], None]]
        for fd, events, action in self._watched():
            poll.register(fd, events)
            actions[fd] = action
        timeout_s = None if self._open is None else self._open.roles.timeout_s()
        for fd, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s):
            actions[fd]()

    def _watched(self) -> Iterator[Watched]:
        yield 0, select.POLLIN, self._on_stdin
        yield self._signals, select.POLLIN, self._on_signal
        if self._out:
            yield 1, select.POLLOUT, self._flush
        if self._open is None:
            return
        for fd in self._open.roles.descriptors():
            yield fd, select.POLLIN, _nothing  # `run` looks at them in any case
        yield self._open.door.fileno(), select.POLLIN, self._on_connection
        for leader in self._leaders:
            events = leader.events | (select.POLLIN if self._listens else 0)
            if events:  # else poll would still return for a connection that is over
                yield leader.fileno(), events, functools.partial(self._on_leader, leader)

    # The launcher.

    def _on_stdin(self) -> None:
        before = self._lines.too_long
        try:
            data = os.read(0, _CHUNK)
        except ConnectionError:
            data = b""
        for line in self._lines.feed(data):
            self._obey(line)
        if self._lines.too_long > before:
            _log.warning("a message from the launcher was dropped: it is too long")
        self._over = self._over or not data

    def _obey(self, line: bytes) -> None:
        try:
            if self._open is not None:
                self._open.dispatcher.from_launcher(parse(line))
                return
            self._open = _Opened(parse(line), self._say)
            self._say({"say": "up", "pid": os.getpid()})
        except ValueError as error:
            _log.warning("a message from the launcher was dropped: %s", error)

    def _say(self, message: Message) -> None:
        if message["say"] != "heard":
            _log.info("%s", ", ".join(f"{name} {value}" for name, value in message.items()))
        try:
            self._out += encode(message)
        except ValueError as error:
            _log.warning("a message for the launcher was dropped: %s", error)

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: os.write(1, self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            _log.warning("the launcher does not listen any more: %s", error)
            self._over = True

    @property
    def _listens(self) -> bool:
        """Whether leaders are read: while the launcher takes what they say."""
        return len(self._out) < _PAUSE

    # Leaders.

    def _on_connection(self) -> None:
        assert self._open is not None
        try:
            leader = self._open.door.accept()
        except OSError as error:
            _log.warning("a connection was refused: %s", error)
            return
        if len(self._leaders) < LEADERS:
            self._leaders.append(leader)
        else:
            _log.warning("a connection was refused: there are %d", LEADERS)
            leader.close()

    def _on_leader(self, leader: Connection) -> None:
        leader.flush()
        if self._listens:
            for line in leader.receive():
                self._hear(leader, line)

    def _hear(self, leader: Connection, line: bytes) -> None:
        assert self._open is not None
        try:
            self._open.dispatcher.from_leader(leader, parse(line))
        except ValueError as error:
            who = "a leader" if leader.client is None else f"the leader of client {leader.client}"
            _log.warning("a message from %s was dropped: %s", who, error)

    def _sweep(self, dispatcher: Dispatcher) -> None:
        """Close the connections that are lost."""
        for leader in [leader for leader in self._leaders if leader.lost is not None]:
            self._leaders.remove(leader)
            leader.close()
            _log.info("a connection of client %s is over: %s", leader.client, leader.lost)
            dispatcher.left(leader)

    # Its own end.

    def _on_signal(self) -> None:
        numbers = os.read(self._signals, _CHUNK)
        self._over = self._over or bool({signal.SIGTERM, signal.SIGHUP} & set(numbers))

    def _close(self) -> None:
        if self._open is None:
            return
        self._open.door.close()
        for leader in self._leaders:
            leader.close()
        self._open.roles.close()


def _nothing(*_: Any) -> None: ...


def _take_signals(*numbers: int) -> int:
    """Return a descriptor on which the numbers of these signals arrive."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in numbers:
        signal.signal(number, _nothing)  # without a handler nothing is written
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _log_to(folder: str) -> None:
    """Write what this process says to its log from now on, whoever says it."""
    os.makedirs(folder, 0o700, exist_ok=True)
    path = os.path.join(folder, "station.log")
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 2)
    os.close(fd)


def main(argv: Sequence[str]) -> int:
    """Run a station; takes no arguments."""
    if argv:
        sys.stderr.write("usage: python -m gluon_esgd.center.station, as gluon-esgd run does\n")
        return 2
    layout = "%(asctime)s station: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=layout)
    try:
        Station().run()
    except OSError as error:
        _log.error("ended: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
