"""Go on from a folder of checkpoints, and say so: a run that begins anew looks no different."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping

from ..durable import write_whole
from ..resume import on_leader
from ..topology import world
from .state import TrainingState

__all__ = ["go_on"]

_FILE = "options.json"  # beside the clients' folders


def go_on(
    state: TrainingState,
    epochs: int,
    options: Mapping[str, Any],
    remedy: str = "give another folder",
) -> bool:
    """Load the newest checkpoint, and print on the main rank what that means for the run.

    Collective as `TrainingState.load`. It prints nothing where nothing was saved. Else one line
    says where the run goes on, or that nothing is left to do, and one more, which of `options` are
    others than in the run that has trained last. They are kept in ``options.json`` beside the
    clients' folders.

    Parameters
    ----------
    state : TrainingState
    epochs : int
        Which `state.epochs` will be given.
    options : mapping of str to object
        Of JSON's types; others count by their text.
    remedy : str
        How to begin anew, for the message.

    Returns
    -------
    bool
        Whether epochs are left for this client.

    Raises
    ------
    OSError, ValueError
        On all ranks of the client: what `load` raises; on those of client 0, too, if the options
        cannot be written.
    """
    found, me = state.load(), world()
    is_left = state.epoch < epochs
    path = Path(os.path.dirname(state.folder), _FILE)
    mine: Dict[str, Any] = json.loads(json.dumps(dict(options), default=str))

    def tell() -> None:
        lines = [] if found is None else [_place(state, epochs, remedy), *_changes(path, mine)]
        if lines:
            print("\n".join(lines), flush=True)
        if is_left:  # else nothing comes of them
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(mine, indent=1).encode())

    if me.client == 0:
        on_leader(me, tell)
    return is_left


def _place(state: TrainingState, epochs: int, remedy: str) -> str:
    if state.epoch < epochs:
        return f"goes on from epoch {state.epoch}, batch {state.batch} ({state.folder})"
    done = f"all {epochs} epochs were done in {state.folder}"
    return f"nothing left: {done}; {remedy} for a new run"


def _changes(path: Path, mine: Mapping[str, Any]) -> List[str]:
    """The line about options that are others than those at `path`, if there are any."""
    try:
        before = json.loads(path.read_bytes())
        names = sorted({*before, *mine})
        found = [(name, before.get(name), mine.get(name)) for name in names]
    except (OSError, ValueError, AttributeError, TypeError):  # older than this, or another's
        return []
    told = [f"{name} {_text(old)}, now {_text(new)}" for name, old, new in found if old != new]
    return [f"not as in the run before: {'; '.join(told)}"] if told else []


def _text(value: Any) -> str:
    return "unset" if value is None else str(value)
