"""What ``gluon-esgd plan`` was asked for, checked; all its faults are told at once."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import replace
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..errors import raise_faults
from ..flags import FlagReader
from .calibration import read_constants
from .cluster import Cluster, Constants
from .configuration import RULES, STOCK
from .recommendation import divisors
from .work import MODELS, Work

__all__ = ["Request", "add_arguments", "request_from"]

_MOST_WORKERS = 100_000
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_RATE = "bits a second, as 100m, 1g or 2.5g"
_COUNT = "an integer of at least 1"

# flag, placeholder, help
_FLAGS = (
    ("--model", "NAME", "of MXNet's model zoo, as resnet50_v1; or give --parameters"),
    ("--parameters", "COUNT", "of the network, as 25.6M"),
    ("--workers", "N", "ranks of all clients together"),
    ("--hosts", "H", "that share them evenly (default: as many as workers)"),
    ("--clients", "C", "that divide the workers (default: all divisors are compared)"),
    ("--servers", "S", "parameter servers, on the hosts in turn (default: 1, with one client 0)"),
    ("--rule", "RULE", f"{', '.join(RULES)}; the last two are MXNet's own (default: esgd)"),
    ("--interval", "STEPS", "between exchanges (default: several are compared)"),
    ("--lazy", "STEPS", "from snapshot to application (default: 1; where compared, as needed)"),
    ("--compression", "fp16", "half floats between hosts and to the servers"),
    ("--compute-s", "SECONDS", "of a step of one worker, without communication"),
    ("--batch-size", "B", "of one worker (default: 32)"),
    ("--samples", "N", "of an epoch (default: ImageNet's 1281167)"),
    ("--link", "RATE", f"of each host, each way: {_RATE}"),
    ("--server-link", "RATE", "servers are on a host of their own with this link"),
    ("--hosts-per-rack", "N", "hosts behind one uplink"),
    ("--uplink", "RATE", "of a rack"),
    ("--latency-us", "MICROSECONDS", "of a message between hosts (default: 50)"),
    ("--cores", "N", "of this one machine, where all the hosts are pretended on one"),
    ("--calibration", "FILE", "constants fitted to what was measured, see docs/predict.md"),
)


class Request(NamedTuple):
    """What was asked for; unset fields are those to be compared."""

    name: str
    work: Work
    cluster: Cluster
    rule: str
    workers: int
    servers: int
    clients: Optional[int]
    interval: Optional[int]
    more: Dict[str, Any]
    is_calibrated: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags."""
    for flag, placeholder, told in _FLAGS:
        parser.add_argument(flag, metavar=placeholder, help=told)
    parser.add_argument("--json", action="store_true", help="print JSON")


def request_from(options: argparse.Namespace) -> Request:
    """Return what parsed options ask for.

    Raises
    ------
    ValueError
        Lists every fault.
    """
    texts = vars(options)
    reader = FlagReader(texts)
    workers = reader.need("workers", _workers, f"an integer from 1 to {_MOST_WORKERS}", 1)
    name, parameters = _network(reader, texts)
    work = Work(
        4.0 * parameters,
        reader.need("compute_s", _seconds, "seconds from 1e-9 to 1e9", 1.0),
        reader.get("batch_size", _count, _COUNT, 32),
        reader.get("samples", _count, _COUNT, 1_281_167),
    )
    rule = reader.get(
        "rule", lambda told: _one_of(told, RULES), f"one of {', '.join(RULES)}", "esgd"
    )
    clients, interval = (reader.get(flag, _count, _COUNT) for flag in ("clients", "interval"))
    servers = reader.get("servers", _whole, "an integer of at least 0", 0 if clients == 1 else 1)
    compression = reader.get("compression", lambda told: _one_of(told, ("fp16",)), "fp16")
    more: Dict[str, Any] = {"half_floats": compression is not None}
    lazy = reader.get("lazy", _whole, "an integer of at least 0")
    if lazy is not None:
        more["lazy"] = lazy
    cluster = _cluster(reader, texts, workers)
    reader.faults += _meaning(rule, workers, clients, servers, interval, more)
    raise_faults("command line", reader.faults)
    is_calibrated = texts["calibration"] is not None
    return Request(
        name, work, cluster, rule, workers, servers, clients, interval, more, is_calibrated
    )


def _network(reader: FlagReader, texts: Dict[str, Any]) -> Tuple[str, float]:
    """Return name and number of parameters."""
    if (texts["model"] is None) == (texts["parameters"] is None):
        reader.faults.append("--model and --parameters: give one of them")
        return "", 1.0
    if texts["model"] is None:
        kind = "a number of parameters, as 25.6M"
        return "a network", reader.get("parameters", _quantity, kind, 1.0)
    name = texts["model"] if texts["model"] in MODELS else f"{texts['model']}_v1"
    if name not in MODELS:
        known = ", ".join(MODELS)
        reader.faults.append(
            f"--model {texts['model']!r} must be one of {known}; for others give --parameters"
        )
    return name, float(MODELS.get(name, 1))


def _cluster(reader: FlagReader, texts: Dict[str, Any], workers: int) -> Cluster:
    hosts = reader.get("hosts", _workers, f"an integer from 1 to {_MOST_WORKERS}", workers)
    rates = {name: reader.get(name, _rate, _RATE) for name in ("server_link", "uplink")}
    per_rack = reader.get("hosts_per_rack", _count, _COUNT)
    if (texts["uplink"] is None) != (texts["hosts_per_rack"] is None):
        reader.faults.append("--hosts-per-rack and --uplink: give both or none")
        per_rack = rates["uplink"] = None
    if hosts > workers:
        reader.faults.append(f"--hosts {hosts} must be at most --workers {workers}")
    return Cluster(
        hosts,
        math.ceil(workers / hosts),
        reader.need("link", _rate, _RATE, 1.0),
        server_hosts=0 if rates["server_link"] is None else 1,
        server_link_bytes_per_s=rates["server_link"],
        hosts_per_rack=per_rack if rates["uplink"] else None,
        uplink_bytes_per_s=rates["uplink"] if per_rack else None,
        cores=reader.get("cores", _count, _COUNT),
        constants=_constants(reader, texts),
    )


def _constants(reader: FlagReader, texts: Dict[str, Any]) -> Constants:
    constants = Constants()
    if texts["calibration"] is not None:
        try:
            constants = read_constants(texts["calibration"])
        except ValueError as error:
            reader.faults.append(f"--calibration: {error}")
    latency_us = reader.get("latency_us", _zero_or_more, "microseconds of at least 0")
    return constants if latency_us is None else replace(constants, latency_s=1e-6 * latency_us)


def _meaning(
    rule: str,
    workers: int,
    clients: Optional[int],
    servers: int,
    interval: Optional[int],
    more: Dict[str, Any],
) -> List[str]:
    """Return the faults of flags that do not go together."""
    faults = []
    if clients is not None and workers % clients:
        allowed = ", ".join(map(str, divisors(workers)))
        faults.append(f"--clients {clients} must divide --workers {workers}: one of {allowed}")
    if rule in STOCK and (clients not in (None, workers) or more["half_floats"] or servers == 0):
        faults.append(f"--rule {rule} has as many clients as workers, servers and no --compression")
    if rule not in ("asgd", "esgd") and interval not in (None, 1):
        faults.append(f"--interval {interval} must be 1, or left out, under --rule {rule}")
    if interval is not None and more.get("lazy", 0) > interval:
        faults.append(f"--lazy {more['lazy']} must not be above --interval {interval}")
    if rule == "asgd" and servers == 0:
        faults.append("--servers 0 must be at least 1 under --rule asgd")
    return faults


def _one_of(told: str, allowed: Sequence[str]) -> str:
    if told not in allowed:
        raise ValueError
    return told


def _whole(told: str) -> int:
    value = int(told)
    if not 0 <= value < 1 << 40:
        raise ValueError
    return value


def _count(told: str) -> int:
    if _whole(told) == 0:
        raise ValueError
    return int(told)


def _workers(told: str) -> int:
    if _count(told) > _MOST_WORKERS:
        raise ValueError
    return int(told)


def _zero_or_more(told: str) -> float:
    value = float(told)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def _seconds(told: str) -> float:
    if not 1e-9 <= float(told) <= 1e9:
        raise ValueError
    return float(told)


def _quantity(told: str) -> float:
    """Read 25.6M, 100m, 2.5g."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([KMGT]?)", told.strip().upper())
    if match is None or float(match[1]) == 0:
        raise ValueError
    return float(match[1]) * _UNITS[match[2]]


def _rate(told: str) -> float:
    """Read bits a second as bytes a second."""
    return _quantity(told) / 8
