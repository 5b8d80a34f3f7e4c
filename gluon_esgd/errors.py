"""Errors that a user of the library can meet at run time.

Wrong arguments are plain ``ValueError`` and ``TypeError``; the classes here
are for what only shows while a job runs.
"""

from __future__ import annotations

from typing import Sequence

__all__ = [
    "CenterError",
    "CollectiveError",
    "LaunchError",
    "LostClientsError",
    "SettingsError",
    "StallError",
    "TopologyError",
    "raise_faults",
]


class TopologyError(RuntimeError):
    """The processes do not form the job that was announced."""


class CollectiveError(RuntimeError):
    """A collective failed on this or another rank; nothing after it is trusted."""


class StallError(CollectiveError, TimeoutError):
    """A wait passed its limit; the message says who was missing."""


class LostClientsError(CollectiveError):
    """Under rule ``sgd`` the sum over clients cannot be had; this client itself is well."""


class CenterError(RuntimeError):
    """The center (agent, servers or scheduler) cannot be reached or refused."""


class LaunchError(RuntimeError):
    """A job could not be started or ended with a failure."""


class SettingsError(ValueError):
    """One or more settings are wrong; the message lists every fault."""


def raise_faults(what: str, faults: Sequence[str], error: type = ValueError) -> None:
    """Raise one `error` that lists all `faults`; return when there is none.

    Parameters
    ----------
    what : str
        What was checked, to open the message ("command line", "environment").
    faults : sequence of str
        One sentence each: name, value, what is allowed, what to do.
    error : type, default ValueError
        The exception to raise.
    """
    if len(faults) == 1:
        raise error(f"{what}: {faults[0]}")
    if faults:
        lines = "".join(f"\n  - {fault}" for fault in faults)
        raise error(f"{what}: {len(faults)} faults:{lines}")
