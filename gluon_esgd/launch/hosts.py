"""Hosts of a job: ``a:4,b:4``, host files, which one is this machine, the remote shell."""

from __future__ import annotations

import re
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import List, Mapping, Sequence, Tuple

__all__ = ["Host", "is_here", "parse_hosts", "place_workers", "read_hostfile", "remote_argv"]

_MOST_SLOTS = 4096
_ENTRY = re.compile(r"([^\s:,\-][^\s:,]{0,252})(?::([0-9]{0,9}))?")
_OWN_LOOPBACK = {"127.0.0.1", "127.0.1.1"}


@dataclass(frozen=True)
class Host:
    """A machine and the number of workers that it takes; one that takes none is for servers."""

    name: str
    slots: int = 1


def parse_hosts(text: str) -> Tuple[Host, ...]:
    """Read ``a:4,b:4``; a name without a number has one slot.

    Raises
    ------
    ValueError
        Names the entry that is neither NAME nor NAME:SLOTS, or comes twice.
    """
    hosts = tuple(_host(entry.strip()) for entry in text.split(","))
    return _distinct(hosts)


def read_hostfile(path: str) -> Tuple[Host, ...]:
    """Read one host a line: ``a``, ``a:4`` or ``a slots=4``; ``#`` starts a comment.

    Raises
    ------
    ValueError
        The file cannot be read, has no host, or a line is not understood.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in Path(path).read_text().splitlines()]
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        raise ValueError(f"{path!r} cannot be read: {error}") from None
    if not any(lines):
        raise ValueError(f"{path!r} names no host; write one a line, as 'a slots=4'")
    entries = (":".join(line.replace("slots=", "").split()) for line in lines if line)
    try:
        return _distinct(tuple(_host(entry) for entry in entries))
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from None


def _host(entry: str) -> Host:
    match = _ENTRY.fullmatch(entry)
    slots = int(match[2] or "1") if match else 0
    if match is None or slots > _MOST_SLOTS or not match[1].isprintable():
        raise ValueError(f"{entry!r:.60} must be NAME or NAME:SLOTS with 0 to {_MOST_SLOTS} slots")
    return Host(match[1], slots)


def _distinct(hosts: Tuple[Host, ...]) -> Tuple[Host, ...]:
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice):.200} given more than once; add up the slots")
    return hosts


def is_here(name: str) -> bool:
    """Say whether `name` is this machine; another 127.x.y.z counts as another machine."""
    if name in {"localhost", socket.gethostname(), socket.getfqdn()}:
        return True
    try:
        address = socket.gethostbyname(name)
    except (OSError, ValueError):  # ValueError: no name that could be asked for
        return False
    if address.startswith("127."):
        return address in _OWN_LOOPBACK
    return _is_own_address(address)


def _is_own_address(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def place_workers(hosts: Sequence[Host], workers: int) -> List[str]:
    """Return the host of each worker: hosts are filled in order."""
    slots = [host.name for host in hosts for _ in range(host.slots)]
    return slots[:workers]


def remote_argv(
    shell: str, host: str, cwd: str, env: Mapping[str, str], argv: Sequence[str]
) -> List[str]:
    """Return the command that runs `argv` on `host` through a remote shell, all quoted."""
    words = ["env", *(f"{name}={value}" for name, value in sorted(env.items())), *argv]
    line = f"cd {shlex.quote(cwd)} && exec " + " ".join(shlex.quote(word) for word in words)
    return [*shlex.split(shell), host, line]
