"""What of a network travels: the order of its parameters, their kinds, and the leader's values."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any, Callable, Dict, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter
from mxnet.util import is_np_array

from .center import AVERAGED, CARRIED, MOVED
from .collectives import agree
from .communicator import Communicator
from .engine import view
from .optim import Masters, weight_copies
from .settings import RULES
from .topology import World

__all__ = [
    "Weights",
    "broadcast",
    "broadcast_arrays",
    "check_alike",
    "classic",
    "contract",
    "device_mean",
    "digest",
    "follow_leader",
    "is_statistic",
    "take_from_leader",
]


def describe(param: Parameter) -> List[Any]:
    """Return name, shape, dtype, grad_req and state of `param`, as ranks compare them."""
    state = "initialized" if param._data is not None else "not initialized yet"
    shape = list(param.shape) if param.shape is not None else None
    return [param.name, shape, np.dtype(param.dtype).name, param.grad_req, state]


def check_alike(params: Sequence[Parameter], comm: Communicator) -> None:
    """Raise ValueError on all ranks unless they bring the same parameters; collective."""
    for param in params:
        if param.shape is None and param._data is not None:  # of a SymbolBlock
            param.shape = param.list_data()[0].shape
    agree(comm, "parameter", [describe(p) for p in params])


def follow_leader(
    params: Sequence[Parameter], comm: Communicator, after: Callable[[], None]
) -> None:
    """Let all ranks start from the leader's values; collective.

    Initialized parameters take them now, the others when they are initialized:
    at the first forward pass, which every rank makes.

    Parameters
    ----------
    params : sequence of Parameter
    comm : Communicator
    after : method
        Called whenever one of them has been initialized; not kept alive.
    """
    ready = [p for p in params if p._data is not None]
    broadcast(ready, comm)
    for param in params:
        # A parameter of two trainers is wrapped once.
        if not isinstance(param._init_impl, _FromLeader):
            param._init_impl = _FromLeader(param, comm)
        alive = [method for method in param._init_impl.after if method() is not None]
        param._init_impl.after = [*alive, weakref.WeakMethod(after)]


class _FromLeader:
    """In place of a parameter's ``_init_impl``: the leader's value, on all ranks."""

    def __init__(self, param: Parameter, comm: Communicator) -> None:
        self._param, self._comm, self._init = param, comm, param._init_impl
        self.after: List[Any] = []

    def __call__(self, data: mx.nd.NDArray, ctx_list: Any) -> None:
        param, comm = self._param, self._comm
        agree(comm, "parameter", [[param.name, list(data.shape), np.dtype(data.dtype).name]])
        host = data.asnumpy()
        comm.broadcast(_bytes(host), f"the broadcast of {param.name}")
        value = mx.nd.array(host, dtype=host.dtype)
        self._init(value.as_np_ndarray() if is_np_array() else value, ctx_list)
        for method in [reference() for reference in self.after]:
            if method is not None:
                method()


def broadcast(params: Sequence[Parameter], comm: Communicator) -> None:
    """Give every rank the leader's values of initialized `params`; collective."""
    broadcast_arrays([p.list_data() for p in params], comm)


def broadcast_arrays(groups: Sequence[Sequence[mx.nd.NDArray]], comm: Communicator) -> None:
    """Give every rank the leader's values; collective.

    Parameters
    ----------
    groups : sequence of sequences of NDArray
        Of each parameter the arrays of all devices; the leader's first one counts.
    comm : Communicator
    """
    if comm.size == 1 or not groups:
        return
    hosts = [arrays[0].asnumpy() for arrays in groups]
    flat = np.concatenate([_bytes(h) for h in hosts])
    comm.broadcast(flat, "the broadcast of parameters")
    if comm.rank == 0:
        return
    start = 0
    for arrays, host in zip(groups, hosts):
        _bytes(host)[:] = flat[start : start + host.nbytes]
        start += host.nbytes
        value = mx.nd.array(host, dtype=host.dtype)
        for array in arrays:
            # From numpy it would fail where oneDNN has laid the weight out anew.
            value.copyto(array.as_nd_ndarray())


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def digest(params: Sequence[Parameter]) -> str:
    """Return a digest of what replicas have alike: all but running statistics."""
    sha = hashlib.sha256()
    for param in params:
        for array in [] if is_statistic(param) else param.list_data():
            sha.update(array.asnumpy().tobytes())
    return sha.hexdigest()


def contract(params: Sequence[Parameter], order: Sequence[int], rule: str) -> Dict[str, int]:
    """Return what all clients must have alike, as numbers that travel through the servers.

    `order` are the positions of `params` in the order in which their gradients are laid.
    """
    text = repr([(i, params[i].shape, params[i].grad_req) for i in order])
    return {
        "num_parameters": len(params),
        "shapes (digest)": int(hashlib.sha256(text.encode()).hexdigest()[:6], 16),
        "rule (sgd 0, asgd 1, esgd 2)": RULES.index(rule),
    }


class Weights:
    """The parameters of a trainer as one flat float32 vector, running statistics last.

    Parameters
    ----------
    params : sequence of Parameter
        All initialized, in the trainer's order.
    optimizer : Optimizer
    updaters : sequence of Updater
        One for each device, to find fp32 masters and other copies of the weights.
    """

    def __init__(self, params: Sequence[Parameter], optimizer: Any, updaters: Sequence) -> None:
        self.order = sorted(range(len(params)), key=lambda i: is_statistic(params[i]))
        self.sizes = [int(np.prod(params[i].shape)) for i in self.order]
        self.size = sum(self.sizes)
        statistics = [n for i, n in zip(self.order, self.sizes) if is_statistic(params[i])]
        self.num_moved = self.size - sum(statistics)
        self._params, self._optimizer, self._updaters = params, optimizer, updaters
        self._masters = Masters(params, optimizer, updaters)

    def kinds(self) -> np.ndarray:
        """Return whether each parameter, in `order`, is moved, averaged or carried now."""
        return np.array([_kind(self._params[i]) for i in self.order], np.int64)

    def _slices(self, flat: mx.nd.NDArray) -> List[mx.nd.NDArray]:
        ends = np.cumsum(self.sizes)
        return [
            flat[int(end) - n : int(end)].reshape(self._params[i].shape)
            for i, n, end in zip(self.order, self.sizes, ends)
        ]

    def flat(self) -> mx.nd.NDArray:
        """Return a new flat float32 CPU array with the weights in it, ready to be read."""
        out = mx.nd.zeros((max(1, self.size),))
        self.copy_to(out)
        out.wait_to_read()
        return out

    def copy_to(self, flat: mx.nd.NDArray) -> None:
        """Push copies of the weights (fp32 masters where there are) into `flat`.

        Devices hold the same weights; of running statistics it is the mean over them.
        """
        for i, out in zip(self.order, self._slices(flat)):
            targets = [target for target, _ in self._arrays(i)]
            source = device_mean(targets) if is_statistic(self._params[i]) else targets[0]
            if source.dtype == out.dtype:
                source.copyto(out)
            else:
                mx.nd.cast(source.as_in_context(out.context), dtype="float32", out=out)

    def add(self, flat: mx.nd.NDArray, kinds: np.ndarray) -> None:
        """Push additions of `flat` to the weights that `kinds` says are moved, masters first."""
        for i, kind, shift in zip(self.order, kinds, self._slices(flat)):
            if kind != MOVED:
                continue
            for target, data in self._arrays(i):
                target += shift.as_in_context(target.context).astype(target.dtype, copy=False)
                if target is not data:
                    mx.nd.cast(target, dtype=data.dtype, out=data)
            for copy in self._copies(i):
                copy += shift.as_in_context(copy.context).astype(copy.dtype, copy=False)

    def set_to(self, flat: mx.nd.NDArray) -> None:
        """Push `flat` into every weight, masters and running statistics too."""
        for i, value in zip(self.order, self._slices(flat)):
            for target, data in self._arrays(i):
                target[:] = value.as_in_context(target.context).astype(target.dtype, copy=False)
                if target is not data:
                    mx.nd.cast(target, dtype=data.dtype, out=data)
            for copy in self._copies(i):
                copy[:] = value.as_in_context(copy.context).astype(copy.dtype, copy=False)

    def write(self, flat: mx.nd.NDArray) -> None:
        """Push `flat` into the network itself (not into masters); variances at least 0."""
        for i, value in zip(self.order, self._slices(flat)):
            if is_statistic(self._params[i]) and self._params[i].name.endswith("var"):
                value = mx.nd.maximum(value, 0)
            for data in map(classic, self._params[i].list_data()):
                data[:] = value.as_in_context(data.context).astype(data.dtype, copy=False)

    def own(self) -> List[List[mx.nd.NDArray]]:
        """Return copies of all weights, for `restore`."""
        return [[data.copy() for data in p.list_data()] for p in self._params]

    def restore(self, own: List[List[mx.nd.NDArray]]) -> None:
        """Put the weights of `own` back."""
        for param, copies in zip(self._params, own):
            for data, copy in zip(param.list_data(), copies):
                copy.copyto(data)

    def follow_parameters(self) -> None:
        """Take weights that the script has set, where there are fp32 masters, for theirs; waits."""
        self._masters.follow_weights()

    def find_masters(self) -> None:
        """Remember where fp32 masters are, right after an update; waits where one is new."""
        self._masters.find()

    def _arrays(self, index: int) -> List[Tuple[mx.nd.NDArray, mx.nd.NDArray]]:
        """For each device the array from which the next update starts, and the weight itself."""
        pairs = zip(self._masters.targets(index), self._params[index].list_data())
        arrays = []
        for target, data in pairs:
            weight = classic(data)
            arrays.append((weight if target is data else classic(target), weight))
        return arrays

    def _copies(self, index: int) -> List[mx.nd.NDArray]:
        """What optimizer states hold besides masters that moves with the weight."""
        states = [updater.states.get(index) for updater in self._updaters]
        copies = [copy for state in states for copy in weight_copies(self._optimizer, state)]
        return [classic(copy) for copy in copies]


def classic(array: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return `array` as an NDArray; of a script with ``npx.set_np()`` it has the same memory."""
    return array.as_nd_ndarray()


def take_from_leader(world: World, weights: Weights, flat: mx.nd.NDArray) -> bool:
    """Put what the leader got from client 0 into every rank; collective in the client.

    Parameters
    ----------
    world : World
    weights : Weights
    flat : NDArray
        This rank's weights, and on the leader client 0's.

    Returns
    -------
    bool
        Whether this rank's trained weights were others before.
    """
    before = view(weights.flat())
    world.control.broadcast(view(flat), "the broadcast of client 0's weights")
    after, trained = view(flat), slice(0, weights.num_moved)
    if not np.array_equal(before, after):  # else they keep what float32 does not hold
        weights.set_to(flat)
    return not np.array_equal(before[trained], after[trained])


def device_mean(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Return the mean of a parameter's arrays over this process's devices; the one if there is one.

    In float32, on the first device; pushed, it does not wait.
    """
    if len(arrays) == 1:
        return arrays[0]
    here = arrays[0].context
    copies = [classic(a).as_in_context(here).astype("float32", copy=False) for a in arrays]
    return mx.nd.add_n(*copies) / len(copies)


def is_statistic(param: Parameter) -> bool:
    """Whether `param` is a running statistic: the forward pass writes it, no gradient does."""
    return param.grad_req == "null" and not param._differentiable


def _kind(param: Parameter) -> int:
    if is_statistic(param):
        return AVERAGED
    return CARRIED if param.grad_req == "null" or param.lr_mult == 0 else MOVED
