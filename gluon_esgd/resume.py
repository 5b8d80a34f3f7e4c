"""Saving what a trainer remembers, and going on from a file, alone or on all ranks of a client."""

from __future__ import annotations

import logging
import os
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
from mxnet import gluon
from mxnet.gluon import Parameter
from mxnet.optimizer import Optimizer, Updater

from .durable import write_whole
from .states import Position, States, apply, check, collect, decode, encode
from .topology import World

__all__ = [
    "client_path",
    "collect_all",
    "collect_alone",
    "load_alone",
    "load_together",
    "on_leader",
    "put_alone",
    "put_in_place",
    "save_together",
]

_log = logging.getLogger(__name__)

_SCALER = ("_loss_scale", "_next_loss_scale", "_unskipped")  # of AMP


def load_alone(trainer: gluon.Trainer, fname: str) -> None:
    """Load a states file into a trainer that is alone, as ``gluon.Trainer.load_states`` does.

    The optimizer stays the same object, and nothing in the file is run.
    """
    with open(fname, "rb") as file:
        states = decode(file.read(), str(fname))
    check(states, trainer._optimizer, trainer._params, str(fname))
    put_alone(trainer, states)


def put_alone(trainer: gluon.Trainer, states: States) -> None:
    """Put checked `states` into a trainer that is alone."""
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    updaters = _updaters_alone(trainer)
    put_in_place(states, trainer._optimizer, updaters, trainer._params, scaler, aloud=True)


def collect_alone(trainer: gluon.Trainer) -> States:
    """Return what a trainer that is alone remembers; waits."""
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    return collect_all(
        trainer._optimizer, _updaters_alone(trainer)[0], trainer._params, None, scaler
    )


def _updaters_alone(trainer: gluon.Trainer) -> Sequence[Updater]:
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    if trainer._params_to_init:
        trainer._init_params()
    return [trainer._kvstore._updater] if trainer._update_on_kvstore else trainer._updaters


def collect_all(
    optimizer: Optimizer,
    updater: Updater,
    params: Sequence[Parameter],
    position: Optional[Position],
    scaler: Any,
) -> States:
    """Return all that a trainer remembers, for a file; waits for arrays."""
    states = collect(optimizer, updater)
    states.shapes = [list(param.shape or ()) for param in params]
    states.position = position
    if scaler is not None:
        states.scaler = {name: getattr(scaler, name) for name in _SCALER}
    return states


def save_together(world: World, fname: str, states: Callable[[], States]) -> None:
    """Let the leader write this client's `states` into a file; collective in the client.

    It is written beside its place and then moved there, so a file is whole or not there.

    Raises
    ------
    OSError, ValueError
        On all ranks of the client: it cannot be written, or holds what cannot be said.
    """
    path = client_path(world.client, fname)
    on_leader(world, lambda: write_whole(path, encode(states())))


def load_together(
    world: World, fname: str, optimizer: Optimizer, params: Sequence[Parameter]
) -> Tuple[States, bool]:
    """Return the states in this client's file, checked, on every rank; collective in the client.

    Only the leader reads the file. Nothing is changed yet.

    Returns
    -------
    states : States
    own : bool
        False where the client took the file of client 0 because it has none of its own.

    Raises
    ------
    OSError, ValueError
        On all ranks of the client: no file, or not one of this trainer.
    """
    found: Tuple[str, bytes, bool] = "", b"", False

    def read() -> None:
        nonlocal found
        found = _read(world.client, fname)

    on_leader(world, read)
    path, size, own = world.broadcast([found[0], len(found[1]), found[2]])
    data = np.frombuffer(bytearray(found[1]), np.uint8) if found[1] else np.empty(size, np.uint8)
    world.control.broadcast(data, "the broadcast of a states file")
    states, fault = None, None
    try:
        states = decode(data.tobytes(), path)
        check(states, optimizer, params, path)
    except Exception as error:  # the others must not wait for this rank
        fault = str(error) if isinstance(error, ValueError) else f"{path}: {error!r}"
    faults = world.allgather(fault)
    for rank, text in enumerate(faults):
        if text is not None:
            raise ValueError(text if faults[0] is not None else f"rank {rank}: {text}")
    assert states is not None
    return states, own  # as the leader says: other ranks may call the file by another name


def put_in_place(
    states: States,
    optimizer: Optimizer,
    updaters: Sequence[Updater],
    params: Sequence[Parameter],
    scaler: Any,
    aloud: bool,
) -> None:
    """Put loaded `states` into a trainer's optimizer, updaters and loss scaler (None: none).

    With `aloud` what the user should know about it is logged.
    """
    for remark in apply(states, optimizer, updaters, params):
        if aloud:
            _log.warning("%s", remark)
    if scaler is not None and states.scaler is not None:
        for name in _SCALER:
            setattr(scaler, name, states.scaler[name])


def client_path(client: int, path: str) -> str:
    """Return a client's own name of a file of which each has one: `path` itself for client 0."""
    return path if client == 0 else f"{path}.client{client}"


def _read(client: int, fname: str) -> Tuple[str, bytes, bool]:
    """The name and the bytes of the client's file, or of client 0's where it has no own."""
    path = client_path(client, fname)
    own = client == 0 or os.path.exists(path)
    if not own:
        _log.warning(
            "client %d has no %s: it takes %s, and the center like a new client",
            client, path, fname,
        )  # fmt: skip
        path = fname
    with open(path, "rb") as file:
        return path, file.read(), own


def on_leader(world: World, action: Callable[[], None]) -> None:
    """Run `action` on the leader; an OSError or ValueError is raised on all ranks.

    Collective in the client.
    """
    failure: Optional[Exception] = None
    said: Optional[List[Any]] = None
    if world.is_leader:
        try:
            action()
        except Exception as error:
            failure, said = error, ["", str(error)]
            if isinstance(error, OSError) and error.errno is not None:
                said = ["OSError", error.errno, error.strerror, str(error.filename)]
    said = world.broadcast(said)
    if failure is not None:
        raise failure
    if said is not None:
        kind, *args = said
        raise OSError(*args) if kind else ValueError(*args)
