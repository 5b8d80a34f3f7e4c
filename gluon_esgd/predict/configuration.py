"""How a job is laid out: rule, clients, servers, interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Tuple

from ..errors import raise_faults
from .checks import number, whole

__all__ = ["RULES", "STOCK", "Configuration"]

# MXNet's own: ``gluon.Trainer(kvstore=...)``, each worker a client, servers without agents.
STOCK = ("dist_sync", "dist_async")
RULES = ("sgd", "asgd", "esgd", *STOCK)
"""What a `Configuration` takes as its rule; the last two are MXNet's own."""
_INTERVAL = {"asgd": 1, "esgd": 64}  # unless given; the other rules meet at every step


@dataclass(frozen=True)
class Configuration:
    """How a job is laid out.

    Attributes
    ----------
    rule : {'sgd', 'asgd', 'esgd', 'dist_sync', 'dist_async'}
        The last two are MXNet's own: each worker pushes gradients to the servers, which update,
        and pulls weights, in every step.
    workers : int
        Ranks of all clients together.
    clients : int, optional
        Divides `workers`; 1 unless given, and `workers` under MXNet's own rules.
    servers : int, optional
        1 unless given, but 0 with one client. With 0 several clients are one MPI job.
    interval : int, optional
        Steps between exchanges; 1 under `asgd` and 64 under `esgd` unless given, else always 1.
    lazy : int
        Steps from the snapshot to the application of an exchange.
    half_floats : bool
        Between hosts and to the servers.
    bucket_bytes : int
        Of a gradient bucket, ``GLUON_ESGD_BUCKET_BYTES``.
    center_wait_s : float
        How long a step waits for a late exchange, ``GLUON_ESGD_CENTER_WAIT_S``.

    Raises
    ------
    ValueError
        Lists every fault.
    """

    rule: str
    workers: int
    clients: Optional[int] = None
    servers: Optional[int] = None
    interval: Optional[int] = None
    lazy: int = 1
    half_floats: bool = False
    bucket_bytes: int = 8 << 20
    center_wait_s: float = 2.0

    def __post_init__(self) -> None:
        stock = self.rule in STOCK
        self._fill("clients", self.workers if stock else 1)
        self._fill("servers", 1 if stock or self.clients != 1 else 0)
        self._fill("interval", _INTERVAL.get(self.rule, 1))
        raise_faults("configuration", self._faults())

    def _fill(self, name: str, value: int) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _faults(self) -> List[str]:
        faults: List[str] = []
        if self.rule not in RULES:
            faults.append(f"rule {self.rule!r} must be one of {', '.join(RULES)}")
        for name, least in (("workers", 1), ("clients", 1), ("servers", 0), ("interval", 1)):
            whole(faults, name, getattr(self, name), least)
        whole(faults, "lazy", self.lazy, 0)
        whole(faults, "bucket_bytes", self.bucket_bytes, 1)
        number(faults, "center_wait_s", self.center_wait_s, 0.0)
        return faults or self._faults_of_meaning()

    def _faults_of_meaning(self) -> List[str]:
        faults: List[str] = []
        workers, clients, servers, interval = self.counts
        if workers % clients:
            faults.append(f"clients {clients} must divide workers {workers}")
        if self.rule in STOCK and (clients != workers or servers == 0 or self.half_floats):
            faults.append(f"rule {self.rule} has as many clients as workers, servers, float32")
        if self.rule not in _INTERVAL and interval != 1:
            faults.append(f"interval {interval} must be 1 under rule {self.rule}")
        if self.rule in _INTERVAL and self.lazy > interval:
            faults.append(f"lazy {self.lazy} must not be above interval {interval}")
        if self.rule == "asgd" and servers == 0 and clients > 1:
            faults.append("rule asgd needs servers: at least 1")
        return faults

    @property
    def counts(self) -> Tuple[int, int, int, int]:
        """Workers, clients, servers and interval, the defaults put in."""
        assert self.clients is not None and self.servers is not None and self.interval is not None
        return self.workers, self.clients, self.servers, self.interval

    @property
    def exchanges(self) -> bool:
        """Whether clients meet a center now and then, beside training."""
        _, clients, servers, _ = self.counts
        return self.rule in _INTERVAL and (clients > 1 or servers > 0)
