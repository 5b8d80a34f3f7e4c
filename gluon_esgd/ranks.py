"""What a script does with the ranks of its client by itself: barrier and broadcasts."""

from __future__ import annotations

import pickle
from typing import Any, List, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .collectives import agree
from .collectives.agreement import by_rank
from .parameters import broadcast_arrays
from .topology import World, world

__all__ = ["barrier", "broadcast_object", "broadcast_parameters", "local_context"]


def local_context() -> mx.Context:
    """Return the device of this rank: a GPU where there is one, else ``mx.cpu()``.

    Not collective, apart from `world`. Ranks of a machine take its GPUs in turn, those of all
    clients: the launcher shows each client its own, and a split MPI job is counted as a whole.
    """
    gpus = mx.context.num_gpus()
    return mx.gpu(world().machine_rank % gpus) if gpus else mx.cpu()


def barrier() -> None:
    """Return when every rank of the client has come here; collective in the client."""
    world().barrier()


def broadcast_object(obj: Any) -> Any:
    """Return the leader's `obj` on every rank; collective in the client.

    By pickle, so it comes as what it was; ``world().broadcast`` carries plain data as JSON says
    it (tuples become lists), in one message and with nothing to be run at the other end.

    Parameters
    ----------
    obj : object
        Looked at on the leader only, which gets it back as it is.

    Raises
    ------
    ValueError
        On all ranks: it could not be pickled, or not be read on some rank.
    """
    me = world()
    if me.size == 1:
        return obj
    data, fault = np.empty(0, np.uint8), None
    if me.is_leader:
        try:
            data = np.frombuffer(pickle.dumps(obj), np.uint8).copy()
        except Exception as error:
            fault = f"obj of type {type(obj).__name__} cannot be pickled: {error!r}"
    _raise_together(me, "broadcast_object", fault)
    size = me.broadcast(data.size)
    data = data if me.is_leader else np.empty(size, np.uint8)
    me.control.broadcast(data, "the broadcast of an object")
    if not me.is_leader:
        try:
            obj = pickle.loads(data.tobytes())
        except Exception as error:
            fault = f"the leader's object cannot be read: {error!r}"
    _raise_together(me, "broadcast_object", fault)
    return obj


def broadcast_parameters(params: Any) -> None:
    """Give every rank the leader's values, on all its devices; collective in the client, waits.

    An `ElasticTrainer` does it with its own parameters when it is made.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter, or dict of NDArray
        Initialized; the same names, shapes and types on all ranks. Dicts in any order.

    Raises
    ------
    ValueError
        On all ranks: a parameter that is not initialized yet, something else than
        parameters, or ranks that bring others.
    """
    me = world()
    named: List[Tuple[str, List[NDArray]]] = []
    fault = None
    try:
        named = [(name, _arrays(name, value)) for name, value in _items(params)]
    except Exception as error:  # others must not wait for this rank
        fault = str(error) if isinstance(error, ValueError) else repr(error)
    _raise_together(me, "broadcast_parameters", fault)
    described = [[name, list(a[0].shape), np.dtype(a[0].dtype).name] for name, a in named]
    agree(me.control, "parameter", described)
    broadcast_arrays([arrays for _, arrays in named], me.control)


def _items(params: Any) -> List[Tuple[str, Any]]:
    if hasattr(params, "items"):
        return sorted(params.items())
    if isinstance(params, (list, tuple)) and all(isinstance(p, Parameter) for p in params):
        return [(param.name, param) for param in params]
    raise ValueError(
        f"params={type(params).__name__} must be a ParameterDict, a dict or list of Parameters, or "
        "a dict of NDArrays"
    )


def _arrays(name: str, value: Any) -> List[NDArray]:
    """The arrays of one parameter, on all its devices."""
    if isinstance(value, Parameter):
        if value._data is None:
            raise ValueError(
                f"parameter {name!r} is not initialized yet: run one forward pass before, or give "
                "layers their input sizes"
            )
        arrays = list(value._data)
    elif isinstance(value, NDArray):
        arrays = [value]
    else:
        raise ValueError(f"{name!r} is of type {type(value).__name__}, not Parameter or NDArray")
    if arrays[0].stype != "default":
        raise ValueError(f"{name!r} is {arrays[0].stype}; only dense arrays can be broadcast")
    return arrays


def _raise_together(me: World, call: str, fault: Optional[str]) -> None:
    """Raise ValueError on all ranks when one has a `fault`; collective."""
    said = dict(enumerate(me.allgather(fault)))
    faults = {rank: text for rank, text in said.items() if text is not None}
    if faults:
        raise ValueError(f"{call}: {by_rank(faults)}")
