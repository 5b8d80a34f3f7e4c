"""States as bytes: our own format, see `tree`, and Gluon's."""

from __future__ import annotations

import io
from typing import Any, Dict

from .form import check_form
from .gluon_file import read_gluon
from .record import Position, States
from .tree import damaged, is_tree, read_tree, write_tree

__all__ = ["as_states", "as_tree", "decode", "encode"]

_KIND = "states"


def encode(states: States) -> bytes:
    """Return `states` as the bytes of a file: numpy's ``.npz``, without anything pickled."""
    out = io.BytesIO()
    write_tree(out, _KIND, as_tree(states))
    return out.getvalue()


def as_tree(states: States) -> Dict[str, Any]:
    """Return `states` as one plain value."""
    position = None if states.position is None else vars(states.position)
    return {**vars(states), "position": position}


def as_states(tree: Dict[str, Any]) -> States:
    """Return the states that `as_tree` has made one value; ValueError where it is none of these."""
    fields = dict(tree)
    position = fields.pop("position")
    states = States(**fields, position=None if position is None else Position(**position))
    check_form(states)
    return states


def decode(data: bytes, name: str) -> States:
    """Return the states in a file's `data`, ours or Gluon's; runs no code that is in them.

    Parameters
    ----------
    data : bytes
    name : str
        The file's, for messages.

    Raises
    ------
    ValueError
        Where it is neither, or damaged.
    """
    if not data:
        raise ValueError(f"{name} is empty: it is no states file")
    if not is_tree(data):
        return read_gluon(data, name)
    tree = read_tree(data, name, _KIND)
    try:
        return as_states(tree)
    except Exception as error:
        raise damaged(name, error) from error
