"""Every environment variable of the library: name, default, meaning, check.

A field ``bucket_bytes`` is read from ``GLUON_ESGD_BUCKET_BYTES``. The launcher
writes with `Settings.environment` what the processes of a job read with
`read`; nothing else in the package looks at these variables, and importing
the package reads none of them.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from .errors import SettingsError, raise_faults

__all__ = [
    "MOST_SECONDS",
    "PREFIX",
    "RANK_VARIABLES",
    "RULES",
    "SIZE_VARIABLES",
    "Settings",
    "own_tuning_path",
    "read",
    "table",
]

PREFIX = "GLUON_ESGD_"
RULES = ("sgd", "asgd", "esgd")

# Set by an mpiexec in each process that it starts: MPICH and relatives, PMIx, Open MPI.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")

# 11 days; the kernel's waits take milliseconds of 31 bits, and a wait without an end is none.
MOST_SECONDS = 1e6

Parser = Callable[[str], Any]


def _int(low: int) -> Parser:
    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise ValueError
        return value

    parse.__doc__ = f"an integer of at least {low}"
    return parse


def _float(low: float, open_: bool = True, high: float = float("inf")) -> Parser:
    def parse(text: str) -> float:
        value = float(text)
        above = low < value if open_ else low <= value and math.copysign(1, value) > 0  # not -0
        if not above or value > high or not math.isfinite(value):
            raise ValueError
        return value

    upper = "" if high == float("inf") else f", {high:.0f} at most"
    parse.__doc__ = f"a number {'above' if open_ else 'of at least'} {low:g}{upper}"
    return parse


def _seconds(open_: bool = True) -> Parser:
    parse = _float(0, open_, MOST_SECONDS)
    parse.__doc__ = str(parse.__doc__).replace("a number", "a number of seconds")
    return parse


def _limit(text: str) -> Optional[float]:
    return None if text == "off" else _seconds()(text)


_limit.__doc__ = f'{_seconds().__doc__}, or "off" for no limit'


def _one_of(*allowed: str) -> Parser:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError
        return text

    parse.__doc__ = "one of " + ", ".join(allowed)
    return parse


def _text(text: str) -> str:
    """a text that is not empty"""
    if not text:
        raise ValueError
    return text


def _address(text: str) -> str:
    """host:port with a port from 1 to 65535"""
    host, _, port = text.rpartition(":")
    if not host or not 0 < int(port) < 65536:
        raise ValueError
    return text


def _places(text: str) -> str:
    """place/workers for each rank, by rank: '0/4;1/4'"""
    for part in text.split(";"):
        place, _, workers = part.partition("/")
        if not 0 <= int(place) < int(workers):
            raise ValueError
    return text


def _sizes(text: str) -> Tuple[int, ...]:
    """ranks of each machine, in the order of ranks: '3,1'"""
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 1:
        raise ValueError
    return sizes


def _setting(default: Any, parse: Parser, meaning: str, by: str = "user") -> Any:
    return field(default=default, metadata={"parse": parse, "meaning": meaning, "by": by})


def _by_launcher(default: Any, parse: Parser, meaning: str) -> Any:
    return _setting(default, parse, meaning, by="launcher")


@dataclass(frozen=True)
class Settings:
    """What the environment says, checked. Times are in seconds, sizes in bytes."""

    job_dir: Optional[str] = _by_launcher(None, _text, "folder of the job: logs, state")
    client: int = _by_launcher(0, _int(0), "number of this process's client")
    num_clients: int = _setting(
        1,
        _int(1),
        "clients in the job; without a scheduler: into how many the ranks of one MPI job are split",
        by="launcher, user",
    )
    client_size: Optional[int] = _by_launcher(None, _int(1), "ranks in each client, as announced")
    num_servers: int = _by_launcher(0, _int(0), "parameter servers in the job")
    scheduler: Optional[str] = _by_launcher(None, _address, "host:port of the scheduler")
    station: Optional[str] = _by_launcher(
        None,
        _text,
        "socket of the station on this machine, by which the leader hears of generations",
    )
    life: int = _by_launcher(0, _int(0), "how often this client was started again")
    grace_s: float = _by_launcher(
        30.0, _seconds(open_=False), "how long a rank has from a SIGTERM to its end"
    )
    places: Optional[str] = _by_launcher(
        None, _places, "place of each rank among the workers of its machine, for GPUs and cores"
    )
    bind: str = _by_launcher("none", _one_of("cores", "none"), "what ranks keep to by their places")
    rule: Optional[str] = _by_launcher(None, _one_of(*RULES), "rule between clients")
    interval: Optional[int] = _by_launcher(None, _int(1), "optimizer steps between two exchanges")
    alpha: Optional[float] = _by_launcher(None, _float(0, open_=False, high=1), "moving rate")
    beta: Optional[float] = _by_launcher(
        None, _float(0, open_=False), "moving rate times max(2, number of clients)"
    )
    lazy: Optional[int] = _by_launcher(None, _int(0), "steps from the snapshot to its application")
    algorithm: str = _setting("auto", _text, "collective algorithm by its registered name")
    compression: Optional[str] = _setting(
        None, _one_of("fp16"), "type of floats between machines and to the servers; unset: float32"
    )
    bucket_bytes: int = _setting(
        8 << 20,
        _int(1),
        "size at which a gradient bucket is closed; with several clients under rule sgd half of it",
    )
    tuning: Optional[str] = _setting(
        None, _text, "file that `gluon-esgd tune` wrote; unset: the user's own, where there is one"
    )
    nodes: Optional[Tuple[int, ...]] = _setting(
        None, _sizes, "ranks that count as one machine, for tests; unset: as MPI finds them"
    )
    wait: str = _setting(
        "back-off", _one_of("back-off", "spin"), "how ranks wait: yield and sleep, or keep the core"
    )
    start_timeout_s: float = _setting(120.0, _seconds(), "limit for all processes to be there")
    stall_warning_s: float = _setting(60.0, _seconds(), "a wait this long is reported")
    stall_abort_s: Optional[float] = _setting(
        None, _limit, "a wait this long ends the job; 'off': never (the launcher sets 600)"
    )
    center_wait_s: float = _setting(
        2.0, _seconds(open_=False), "how long a late exchange is waited for before it is put off"
    )
    center_snapshot_s: Optional[float] = _setting(
        60.0, _limit, "how often the center is written to the job's folder; 'off': never"
    )
    center_limit_s: float = _setting(
        60.0, _seconds(), "no answer of agent or servers for this long is an error"
    )

    @property
    def is_split(self) -> bool:
        """Whether the clients are ranks of one MPI job and no server is between them."""
        return self.num_clients > 1 and self.num_servers == 0 and self.scheduler is None

    def environment(self) -> Dict[str, str]:
        """Return the variables that make `read` give back these settings.

        Values that equal the default are left out.
        """
        out = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                text = "off" if value is None else str(value)
                if isinstance(value, tuple):
                    text = ",".join(map(str, value))
                out[PREFIX + f.name.upper()] = text
        return out


def read(environ: Optional[Mapping[str, str]] = None) -> Settings:
    """Read and check the settings.

    Parameters
    ----------
    environ : mapping of str to str, optional
        The environment to read; ``os.environ`` unless given.

    Raises
    ------
    SettingsError
        Lists every variable that is unknown or has a value out of range.
    """
    environ = os.environ if environ is None else environ
    known = {PREFIX + f.name.upper(): f for f in fields(Settings)}
    values: Dict[str, Any] = {}
    faults: List[str] = []
    for name in sorted(n for n in environ if n.startswith(PREFIX)):
        if name not in known:
            faults.append(_unknown(name, sorted(known)))
            continue
        parse = known[name].metadata["parse"]
        try:
            values[known[name].name] = parse(environ[name])
        except ValueError:
            faults.append(f"{name}={environ[name]!r} must be {parse.__doc__}")
    raise_faults("environment", faults, SettingsError)
    return Settings(**values)


def _unknown(name: str, known: List[str]) -> str:
    """The fault of a variable that is none; names are compared without what they all begin with."""
    own, every = [other[len(PREFIX) :] for other in known], ", ".join(known)
    near = get_close_matches(name[len(PREFIX) :], own, n=1)
    if not near:
        return f"{name} is not a setting; known are {every}"
    return f"{name} is not a setting; nearest is {PREFIX}{near[0]}; known are {every}"


def own_tuning_path() -> str:
    """Return where the user's own table of ``gluon-esgd tune`` lies, be there one or not."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):  # to be ignored, says the XDG Base Directory Specification
        folder = os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(folder, "gluon_esgd", "tuning.json")


def table() -> str:
    """Return the settings as a Markdown table, for the documentation."""
    rows = ["| variable | default | allowed | meaning | set by |", "|---|---|---|---|---|"]
    for f in fields(Settings):
        default = "unset" if f.default is None else f.default
        allowed = (f.metadata["parse"].__doc__ or "").strip()
        rows.append(
            f"| `{PREFIX}{f.name.upper()}` | {default} | {allowed} "
            f"| {f.metadata['meaning']} | {f.metadata['by']} |"
        )
    return "\n".join(rows) + "\n"
