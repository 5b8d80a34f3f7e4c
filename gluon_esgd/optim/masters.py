"""Where an optimizer keeps the fp32 master of a half-precision weight."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter
from mxnet.optimizer import LARS, NAG, SGD, Optimizer, Updater

__all__ = ["Masters"]

_Path = Tuple[Any, ...]  # indices and keys that lead from a state to an array in it


class Masters:
    """Finds the arrays that the next updates of a trainer's parameters start from.

    Where ``multi_precision`` holds, these are the fp32 masters of half-precision weights: an
    exchange has to move them, as the next update overwrites a weight from its master. MXNet's own
    optimizers say where they put them. Where a subclass overrides
    ``create_state_multi_precision``, the master is looked for: the float32 array of the weight's
    shape whose cast is the weight. That waits, once for each parameter; the place is remembered.

    Parameters
    ----------
    params : sequence of Parameter
        The trainer's.
    optimizer : Optimizer
    updaters : sequence of Updater
        One for each device.
    """

    def __init__(
        self, params: Sequence[Parameter], optimizer: Optimizer, updaters: Sequence[Updater]
    ) -> None:
        self._params, self._optimizer, self._updaters = params, optimizer, updaters
        self._usual = _usual_place(optimizer)
        self._found: Dict[int, _Path] = {}
        self._looked: Set[int] = set()

    def find(self) -> None:
        """Look for masters that are new, right after an update: then weights are their casts.

        It waits, and only then. What it does not find is an error where it is needed.
        """
        if self._usual is None and self._optimizer.multi_precision:
            new = [i for i in range(len(self._params)) if self._has_master(i)]
            if not self._looked.issuperset(new):
                self._looked.update(new)
                self._look()

    def targets(self, index: int) -> List[mx.nd.NDArray]:
        """Return, for each device, the master of parameter `index`, or the weight itself.

        The weight where there is no master (yet: an optimizer makes it in its first update).

        Raises
        ------
        ValueError
            On all ranks, whose weights and states are the same: no array, or more than one, can
            be the master.
        """
        if not self._has_master(index):
            return self._params[index].list_data()
        place = self._usual if self._usual is not None else self._place(index)
        return [_at(updater.states[index], place) for updater in self._updaters]

    def follow_weights(self) -> None:
        """Set masters whose cast is not the weight any more to the weight; waits.

        A script that sets weights does not reach their masters.
        """
        for index, param in enumerate(self._params):
            for master, weight in zip(self.targets(index), param.list_data()):
                if master is not weight and not _same(master, weight):
                    master[:] = weight.astype(master.dtype)

    def _has_master(self, index: int) -> bool:
        half = self._params[index].list_data()[0].dtype == np.float16
        if not self._optimizer.multi_precision or not half:
            return False
        return all(index in updater.states for updater in self._updaters)

    def _place(self, index: int) -> _Path:
        if index not in self._found:
            self._look()
        if index not in self._found:
            raise ValueError(self._not_found(index))
        return self._found[index]

    def _look(self) -> None:
        """Find what can be told apart; then, say, momentum and master of a bias that are zeros."""
        several = {}
        for index in range(len(self._params)):
            if index not in self._found and self._has_master(index):
                places = self._candidates(index)
                if len(places) == 1:
                    self._found[index] = places[0]
                else:
                    several[index] = places
        elsewhere = set(self._found.values())
        for index, places in several.items():
            places = [place for place in places if place in elsewhere]
            if len(places) == 1:
                self._found[index] = places[0]

    def _candidates(self, index: int) -> List[_Path]:
        weight, state = self._params[index].list_data()[0], self._updaters[0].states[index]
        return [place for place, array in _arrays(state) if _may_be_master(array, weight)]

    def _not_found(self, index: int) -> str:
        number, name = len(self._candidates(index)), type(self._optimizer).__name__
        return (
            f"optimizer {name!r}, parameter {self._params[index].name!r}: an exchange has to move "
            f"the fp32 master of the float16 weight, but {number or 'no'} float32 arrays in the "
            "state have its shape and its values; let create_state_multi_precision return one that "
            "does (as MXNet's own optimizers do), or use multi_precision=False"
        )


def _usual_place(optimizer: Optimizer) -> Optional[_Path]:
    """Where MXNet's classes put a master; None where a subclass has its own way."""
    made_by = getattr(optimizer.create_state_multi_precision, "__func__", None)
    if made_by is Optimizer.create_state_multi_precision:
        return (0,)
    if made_by in [kind.create_state_multi_precision for kind in (SGD, NAG, LARS)]:
        return (1,)
    return None


def _arrays(state: Any, place: _Path = ()) -> Iterator[Tuple[_Path, mx.nd.NDArray]]:
    """All arrays in nested tuples, lists and dicts."""
    if isinstance(state, mx.nd.NDArray):
        yield place, state
    elif isinstance(state, (tuple, list, dict)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from _arrays(value, (*place, key))


def _at(state: Any, place: _Path) -> mx.nd.NDArray:
    for key in place:
        state = state[key]
    return state


def _may_be_master(array: mx.nd.NDArray, weight: mx.nd.NDArray) -> bool:
    alike = array.dtype == np.float32 and array.shape == weight.shape and array.stype == "default"
    return alike and _same(array, weight)


def _same(master: mx.nd.NDArray, weight: mx.nd.NDArray) -> bool:
    cast = master.astype(weight.dtype).asnumpy()
    return bool(np.array_equal(cast, weight.asnumpy(), equal_nan=True))
