"""The environment that MXNet's parameter server (ps-lite) reads, for a role in the job.

MXNet must be imported before it is applied: with a role of server or
scheduler, the import itself becomes that process and never returns.
"""

from __future__ import annotations

import os
import socket
from typing import Dict, List, Mapping

__all__ = ["environment", "node_host", "set_role", "variables"]

ROLES = ("scheduler", "server", "worker")


def node_host(scheduler_host: str) -> str:
    """Return this host's address on the way to the scheduler (127.0.0.1 on its own host)."""
    target = socket.gethostbyname(scheduler_host)
    if target.startswith("127."):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # sends nothing: it only asks for the route
        return str(probe.getsockname()[0])


def environment(role: str, scheduler: str, num_clients: int, num_servers: int) -> Dict[str, str]:
    """Return the variables of a `role` whose scheduler is at ``host:port``.

    A node announces and listens on `node_host`; a client's agent is a worker.
    """
    if role not in ROLES:
        raise ValueError(f"role={role!r} must be one of {', '.join(ROLES)}")
    host, _, port = scheduler.rpartition(":")
    return {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": socket.gethostbyname(host),
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NUM_WORKER": str(num_clients),
        "DMLC_NUM_SERVER": str(num_servers),
        "DMLC_NODE_HOST": node_host(host),
        # an array above the bound would be cut over all servers, which our chunks already are
        "MXNET_KVSTORE_BIGARRAY_BOUND": str(2**31 - 1),
    }


def variables(environ: Mapping[str, str]) -> List[str]:
    """Return the names in `environ` that ps-lite would read."""
    return [name for name in environ if name.startswith(("DMLC_", "PS_")) or name == "PORT"]


def set_role(role: str, scheduler: str, num_clients: int, num_servers: int) -> None:
    """Give this process its role; whatever the environment said of one before is dropped.

    ``PORT``, which many sites set, would make every node but the scheduler bind that port.
    """
    for name in variables(os.environ):
        del os.environ[name]
    os.environ.update(environment(role, scheduler, num_clients, num_servers))
