"""What an optimizer and its updaters remember: read off, compared with a trainer, put in place."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence

import mxnet as mx
from mxnet.gluon import Parameter
from mxnet.lr_scheduler import LRScheduler
from mxnet.optimizer import Optimizer, Updater

from .form import check_attributes
from .values import Array, CannotSay, live, plain, plain_items, shapes

__all__ = ["Position", "Scheduler", "States", "apply", "check", "collect"]

# Not of the optimizer alone: the trainer's parameters, what each step sets, an alias of a row.
_NOT_SAID = ("param_dict", "rescale_grad", "lr_scheduler", "_index_update_count")
_COUNTS = "_all_index_update_counts"
_SCHEDULERS = "mxnet.lr_scheduler"

Scheduler = Optional[Dict[str, Any]]  # module, name, attributes


@dataclass
class Position:
    """Where a trainer of a distributed run stands.

    Attributes
    ----------
    step : int
        Updates so far.
    last_due : int
        The step at which an exchange was due last.
    center : Array or None
        The center, flat float32 in the order of `parameters.Weights`; None where there is none.
    base : Array or None
        Rule ``asgd``: the center from which the client's weights grew, the same way.
    """

    step: int = 0
    last_due: int = 0
    center: Optional[Array] = None
    base: Optional[Array] = None


@dataclass
class States:
    """What is in a states file, plain (see `values`).

    Attributes
    ----------
    states : dict of int to value
        The first updater's, by number of the parameter.
    optimizer : str or None
        Name of the optimizer's class; None in a file that has only `states`.
    attributes : dict of str to value
        The optimizer's, update counts among them.
    scheduler : dict or None
        Its learning rate scheduler: module, name, attributes.
    left_out : list of str
        Attributes of the optimizer that are neither of these, and not loaded.
    shapes : list of list of int, optional
        Of the trainer's parameters.
    scaler : dict, optional
        Attributes of AMP's loss scaler.
    position : Position, optional
        Unless the file is of ``gluon.Trainer``.
    """

    states: Dict[int, Any]
    optimizer: Optional[str] = None
    attributes: Dict[str, Any] = field(default_factory=dict)
    scheduler: Scheduler = None
    left_out: List[str] = field(default_factory=list)
    shapes: Optional[List[List[int]]] = None
    scaler: Optional[Dict[str, Any]] = None
    position: Optional[Position] = None


def collect(optimizer: Optimizer, updater: Updater) -> States:
    """Return what `optimizer` and `updater` remember; waits for arrays.

    Attributes that are neither numbers, texts nor arrays are left out.

    Raises
    ------
    ValueError
        Where the state of a parameter holds something else.
    """
    states = {}
    for index, state in updater.states.items():
        try:
            states[index] = plain(state)
        except CannotSay as error:
            raise ValueError(
                f"optimizer {type(optimizer).__name__!r} keeps {error} in its state of parameter "
                f"{index}, which a states file does not hold: only numbers and dense arrays"
            ) from None
    own = {name: value for name, value in vars(optimizer).items() if name not in _NOT_SAID}
    attributes = plain_items(own)
    return States(
        states=states,
        optimizer=type(optimizer).__name__,
        attributes=attributes,
        left_out=[name for name in own if name not in attributes],
        scheduler=_collect_scheduler(optimizer.lr_scheduler),
    )


def _collect_scheduler(scheduler: Any) -> Scheduler:
    if scheduler is None:
        return None
    attributes = plain_items(getattr(scheduler, "__dict__", {}))
    kind = scheduler if hasattr(scheduler, "__name__") else type(scheduler)
    return {"module": kind.__module__, "name": kind.__name__, "attributes": attributes}


def check(states: States, optimizer: Optimizer, params: Sequence[Parameter], name: str) -> None:
    """Raise ValueError unless `states` of the file `name` fit a trainer; changes nothing.

    Parameters
    ----------
    states : States
    optimizer : Optimizer
    params : sequence of Parameter
        The trainer's, in its order.
    name : str
    """
    own = type(optimizer).__name__
    if states.optimizer not in (None, own):
        raise ValueError(
            f"{name} holds the states of optimizer {states.optimizer!r}, but the trainer has "
            f"{own!r}: make the trainer with {states.optimizer!r}"
        )
    check_attributes(states.attributes, optimizer, name)
    _check_scheduler(states.scheduler, optimizer, name)
    if states.shapes is not None:
        _check_shapes(states.shapes, params, name)
    for index in states.states:
        if type(index) is not int or not 0 <= index < len(params):
            raise ValueError(
                f"{name} holds a state of parameter {index!r}, but the trainer has "
                f"{len(params)} parameters: 0 to {len(params) - 1}"
            )
    _check_states(states, optimizer, params, name)


def _check_scheduler(scheduler: Scheduler, optimizer: Optimizer, name: str) -> None:
    if scheduler is None or _fits(scheduler, optimizer) or _scheduler_class(scheduler):
        return
    raise ValueError(
        f"{name} has a learning rate scheduler {scheduler['module']}.{scheduler['name']}, which "
        "is not made from a file: give the trainer's optimizer one, lr_scheduler="
        f"{scheduler['name']}(...)"
    )


def _fits(scheduler: Dict[str, Any], optimizer: Optimizer) -> bool:
    own = _collect_scheduler(optimizer.lr_scheduler)
    return own is not None and own["name"] == scheduler["name"]


def _scheduler_class(scheduler: Dict[str, Any]) -> Any:
    """The class where it is one of MXNet's own schedulers, else None."""
    kind = getattr(mx.lr_scheduler, scheduler["name"], None)
    known = isinstance(kind, type) and issubclass(kind, LRScheduler)
    return kind if known and scheduler["module"] == _SCHEDULERS else None


def _check_shapes(found: List[List[int]], params: Sequence[Parameter], name: str) -> None:
    if len(found) != len(params):
        raise ValueError(f"{name} is of {len(found)} parameters, but the trainer has {len(params)}")
    for index, (shape, param) in enumerate(zip(found, params)):
        if param._data is not None and tuple(shape) != param.shape:
            raise ValueError(
                f"{name} has shape {tuple(shape)} for parameter {index}, but "
                f"{param.name} of the trainer has {param.shape}"
            )


def _check_states(
    states: States, optimizer: Optimizer, params: Sequence[Parameter], name: str
) -> None:
    """Arrays that the optimizer would make must have the shapes of those in the file."""
    like = copy.copy(optimizer)
    vars(like).update({k: v for k, v in states.attributes.items() if not isinstance(v, Array)})
    for index, state in states.states.items():
        if params[index]._data is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # half floats: said when it makes its own
                weight = params[index]._data[0]
                wanted = shapes(like.create_state_multi_precision(index, weight))
            found = shapes(state)
        except mx.base.MXNetError as error:
            said = (str(error).strip().splitlines() or [repr(error)])[-1]
            raise ValueError(f"{name} has a damaged state of parameter {index}: {said}") from error
        except AssertionError:
            continue  # an optimizer that refuses this parameter says so at its update
        for place in wanted.keys() & found.keys():
            if wanted[place] != found[place]:
                raise ValueError(
                    f"{name} has a state of shape {found[place]} for parameter {index}, but "
                    f"{params[index].name} of the trainer needs {wanted[place]}"
                )


def apply(
    states: States,
    optimizer: Optimizer,
    updaters: Sequence[Updater],
    params: Sequence[Parameter],
) -> List[str]:
    """Put checked `states` into a trainer's optimizer, the same object, and its updaters.

    Parameters
    ----------
    states : States
    optimizer : Optimizer
    updaters : sequence of Updater
        One for each device; all take the same states.
    params : sequence of Parameter

    Returns
    -------
    list of str
        What the user should know about it.
    """
    for number, updater in enumerate(updaters):
        updater.states = {
            index: live(state, params[index].list_ctx()[number])
            for index, state in states.states.items()
        }
        updater.states_synced = dict.fromkeys(updater.states, False)
    if states.optimizer is None:
        return []
    ctx = params[0].list_ctx()[0] if params else mx.cpu()
    kept = {k: v for k, v in states.attributes.items() if k not in _NOT_SAID}
    vars(optimizer).update(live(kept, ctx))
    _apply_counts(optimizer, params)
    remarks = _apply_scheduler(states.scheduler, optimizer, ctx)
    if states.left_out:
        remarks.append(
            "attributes of the optimizer that a states file does not hold stay as they are: "
            + ", ".join(states.left_out)
        )
    return remarks


def _apply_counts(optimizer: Optimizer, params: Sequence[Parameter]) -> None:
    """Let devices that were not there count on from one that was."""
    counts = vars(optimizer)[_COUNTS]
    furthest: Dict[Any, int] = max(counts.values(), key=lambda row: sum(row.values()), default={})
    devices = sorted({ctx.device_id for param in params for ctx in param.list_ctx()} or {0})
    for device in devices:
        counts[device] = counts.get(device) or dict(furthest)
    optimizer._set_current_context(devices[0])


def _apply_scheduler(scheduler: Scheduler, optimizer: Optimizer, ctx: mx.Context) -> List[str]:
    own = optimizer.lr_scheduler
    if scheduler is None:
        optimizer.lr_scheduler = None
        return [] if own is None else [
            "the file was written without a learning rate scheduler: the trainer's "
            f"{type(own).__name__} is taken away, as gluon.Trainer does"
        ]  # fmt: skip
    if not _fits(scheduler, optimizer):
        kind = _scheduler_class(scheduler)
        own = optimizer.lr_scheduler = kind.__new__(kind)
    getattr(own, "__dict__", {}).update(live(scheduler["attributes"], ctx))
    return []
