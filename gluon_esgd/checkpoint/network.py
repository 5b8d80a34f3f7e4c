"""The parameters of a network by name, and the running statistics of each rank and device."""

from __future__ import annotations

import base64
from typing import Dict, List, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import Parameter

from ..parameters import classic, is_statistic
from ..states import Array, live
from .content import Checkpoint

__all__ = ["check", "collect", "own_statistics", "put", "put_statistics", "statistics_array"]


def named(net: gluon.Block) -> Dict[str, Parameter]:
    """Return the parameters by the names of ``net.save_parameters``, shared ones once."""
    found: Dict[str, Parameter] = {}
    for name, param in net._collect_params_with_prefix().items():
        if not any(param is other for other in found.values()):
            found[name] = param
    return found


def collect(net: gluon.Block) -> Dict[str, Array]:
    """Return copies of all parameters in host memory, of the first device; waits for them."""
    out = {}
    for name, param in named(net).items():
        data = param.list_data()[0]
        kind = "np" if isinstance(data, mx.np.ndarray) else "nd"
        out[name] = Array(data.asnumpy(), kind)
    return out


def check(net: gluon.Block, checkpoint: Checkpoint, fname: str) -> None:
    """Raise ValueError unless what is of the network in the file `fname` fits `net`."""
    found = checkpoint.parameters
    _check_parameters(net, found, fname)
    wanted = sum(found[name].host.nbytes for name, p in named(net).items() if is_statistic(p))
    for row in (row for rows in checkpoint.statistics for row in rows):
        if row.host.nbytes != wanted:
            raise ValueError(
                f"{fname} has {row.host.nbytes} bytes of running statistics, but the network has "
                f"{wanted}"
            )


def _check_parameters(net: gluon.Block, found: Dict[str, Array], fname: str) -> None:
    params = named(net)
    missing = [name for name in params if name not in found]
    foreign = [name for name in found if name not in params]
    if missing or foreign:
        raise ValueError(
            f"{fname} is of another network: without {_list(missing)}, which this one has; with "
            f"{_list(foreign)}, which it has not"
        )
    for name, param in params.items():
        host = found[name].host
        if param._data is None and not param._deferred_init:
            raise ValueError(
                f"parameter {name!r} is not initialized: call net.initialize() before a "
                "checkpoint is loaded"
            )
        if not _fits(param, host):
            raise ValueError(
                f"{fname} has {name} as {host.dtype} of shape {host.shape}, but the network has "
                f"{np.dtype(param.dtype).name} of shape {param.shape}"
            )


def _fits(param: Parameter, host: np.ndarray) -> bool:
    shape = param.shape
    known = shape is None or (
        len(shape) == host.ndim and all(a in (b, 0, -1) for a, b in zip(shape, host.shape))
    )
    return known and np.dtype(param.dtype) == host.dtype


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more if names else "nothing"


def put(net: gluon.Block, found: Dict[str, Array]) -> None:
    """Put checked parameters into `net`; collective in the client where some are deferred."""
    for name, param in named(net).items():
        param._load_init(live(found[name], mx.cpu()), param.list_ctx())


def _statistics(net: gluon.Block) -> List[Parameter]:
    return [param for param in named(net).values() if is_statistic(param)]


def own_statistics(net: gluon.Block) -> List[str]:
    """Return the running statistics of each device of this rank, as JSON can say them."""
    arrays = [[data.asnumpy() for data in param.list_data()] for param in _statistics(net)]
    devices = zip(*arrays) if arrays else [()]
    return [base64.b64encode(b"".join(a.tobytes() for a in d)).decode() for d in devices]


def statistics_array(said: str) -> Array:
    """Return what `own_statistics` says of a device as bytes in an array."""
    return Array(np.frombuffer(base64.b64decode(said), np.uint8), "numpy")


def put_statistics(
    net: gluon.Block, found: Sequence[Sequence[Array]], rank: int, size: int
) -> None:
    """Give `rank` its own running statistics back, or the mean of all where there are others.

    Parameters
    ----------
    net : Block
    found : sequence of sequences of Array
        Bytes, of each device of each rank.
    rank, size : int
        Of this client.
    """
    at, params = 0, _statistics(net)
    devices = len(params[0].list_data()) if params else 0
    same = len(found) == size and len(found[rank]) == devices
    rows = found[rank] if same else [row for rows in found for row in rows]
    for param in params:
        dtype, shape = np.dtype(param.dtype), param.shape
        nbytes = int(np.prod(shape)) * dtype.itemsize
        hosts = [row.host[at : at + nbytes].view(dtype).reshape(shape) for row in rows]
        if not same:
            hosts = [np.mean(hosts, 0, np.float64).astype(dtype)] * devices
        for data, host in zip(param.list_data(), hosts):
            classic(data)[:] = mx.nd.array(host, ctx=data.context, dtype=dtype)
        at += nbytes
