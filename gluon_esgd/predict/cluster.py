"""The cluster: hosts, links, and the constants of what moves bytes between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import List, Optional

from ..errors import raise_faults
from .checks import number, whole

__all__ = ["SHARES", "Cluster", "Constants"]

SHARES = ("efficiency", "stock_duplex", "duplex", "pipelining")  # constants of 1 at most
_MAY_BE_0 = ("latency_s", *SHARES[1:], "exchange_s", "overhead_s")


@dataclass(frozen=True)
class Constants:
    """What is not on a data sheet, and is fitted by `calibrate`; the defaults are guesses.

    Attributes
    ----------
    efficiency : float
        Share of a link's rate that data get, behind headers and the conduct of TCP.
    latency_s : float
        Of one message between hosts.
    server_bytes_per_s : float
        At which one server takes in what is pushed and adds it up.
    agent_bytes_per_s : float
        At which an agent makes a difference from center and snapshot, in bytes of the center.
    memory_bytes_per_s : float
        Of a host, reading and writing counted alike.
    socket_bytes_per_s : float
        At which one core moves bytes through sockets, both ends counted.
    stock_duplex : float
        Which share of the shorter of push and pull runs beside the longer under stock rules, where
        keys travel independently; 0: one after the other, 1: all of it.
    duplex : float
        The same of exchanges: of one client's pull beside the pushes of others.
    pipelining : float
        The same under ``sgd``: of the stages of a bucket beside those of other buckets.
    exchange_s : float
        Fixed cost of an exchange, and of the round of a bucket: messages, engine, waking up.
    overhead_s : float
        Fixed cost of a step, beside the compute.
    """

    efficiency: float = 0.94  # 1448 bytes of data in 1538 on the wire of an Ethernet
    latency_s: float = 50e-6
    server_bytes_per_s: float = 1e9
    agent_bytes_per_s: float = 1e9
    memory_bytes_per_s: float = 20e9
    socket_bytes_per_s: float = 2e9
    stock_duplex: float = 0.5
    duplex: float = 0.8
    pipelining: float = 0.8
    exchange_s: float = 2e-3
    overhead_s: float = 1e-3

    def __post_init__(self) -> None:
        faults: List[str] = []
        for one in fields(self):
            least = 0.0 if one.name in _MAY_BE_0 else None
            most = 1.0 if one.name in SHARES else math.inf
            number(faults, one.name, getattr(self, one.name), least, most)
        raise_faults("constants", faults)


@dataclass(frozen=True)
class Cluster:
    """Hosts joined by one switch over full duplex links of one rate, or racks of such hosts.

    Attributes
    ----------
    hosts : int
        That have workers.
    workers_per_host : int
        Hosts are filled one after the other, as the launcher does.
    link_bytes_per_s : float
        Of each host, each way.
    server_hosts : int
        Hosts that servers have for themselves; 0: server ``k`` is on host ``k % hosts``, as the
        launcher places it.
    server_link_bytes_per_s : float, optional
        Of those hosts; as the others unless given.
    hosts_per_rack : int, optional
        Every so many hosts share an uplink; hosts of servers alone are outside of all racks.
    uplink_bytes_per_s : float, optional
        Of a rack, each way; given with `hosts_per_rack`.
    cores : int, optional
        Cores of the one machine on which all these hosts are only pretended. Unset: every host
        has cores enough for its workers and for what moves their bytes.
    constants : Constants

    Raises
    ------
    ValueError
        Lists every fault.
    """

    hosts: int
    workers_per_host: int
    link_bytes_per_s: float
    server_hosts: int = 0
    server_link_bytes_per_s: Optional[float] = None
    hosts_per_rack: Optional[int] = None
    uplink_bytes_per_s: Optional[float] = None
    cores: Optional[int] = None
    constants: Constants = field(default_factory=Constants)

    def __post_init__(self) -> None:
        faults: List[str] = []
        whole(faults, "hosts", self.hosts, 1)
        whole(faults, "workers_per_host", self.workers_per_host, 1)
        number(faults, "link_bytes_per_s", self.link_bytes_per_s)
        whole(faults, "server_hosts", self.server_hosts, 0)
        for name in ("server_link_bytes_per_s", "uplink_bytes_per_s"):
            if getattr(self, name) is not None:
                number(faults, name, getattr(self, name))
        for name in ("hosts_per_rack", "cores"):
            if getattr(self, name) is not None:
                whole(faults, name, getattr(self, name), 1)
        if self.server_link_bytes_per_s is not None and self.server_hosts == 0:
            faults.append("server_link_bytes_per_s needs server_hosts of at least 1")
        if (self.hosts_per_rack is None) != (self.uplink_bytes_per_s is None):
            faults.append("hosts_per_rack and uplink_bytes_per_s: give both or none")
        raise_faults("cluster", faults)

    def rate(self, kind: str) -> float:
        """Return the bytes of data that a link of this kind takes in a second, each way.

        Parameters
        ----------
        kind : {'host', 'rack', 'server host'}
        """
        rates = {
            "host": self.link_bytes_per_s,
            "rack": self.uplink_bytes_per_s or math.inf,
            "server host": self.server_link_bytes_per_s or self.link_bytes_per_s,
        }
        return self.constants.efficiency * rates[kind]
