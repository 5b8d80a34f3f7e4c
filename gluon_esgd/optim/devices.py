"""Several devices of a process that go through the same update."""

from __future__ import annotations

import numbers
from typing import Any, Dict, List

from mxnet.optimizer import Optimizer, Updater

__all__ = ["keep_alike"]


def keep_alike(updaters: List[Updater]) -> None:
    """Let the updates on all devices start from the same numbers; changes `updaters` in place.

    The updaters of a trainer share one optimizer. What it keeps for each parameter and device is
    counted apart (momentum, update counts), but not what it keeps in itself: ``Nadam.m_schedule``
    would move on once for each device, and ``LARS`` would see a new learning rate on the first
    device only. So what the first device starts from is given to the others too.
    """
    if len(updaters) < 2:
        return
    before: Dict[str, Any] = {}
    updaters[:] = [_Alike(u.optimizer, before, i == 0) for i, u in enumerate(updaters)]


class _Alike(Updater):
    """The updater of one device of several.

    Parameters
    ----------
    optimizer : Optimizer
    before : dict
        What the optimizer held before the update on the first device; all devices share it.
    first : bool
        Whether this is the first.
    """

    def __init__(self, optimizer: Optimizer, before: Dict[str, Any], first: bool) -> None:
        super().__init__(optimizer)
        self._before, self._first = before, first

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        own = self.optimizer.__dict__
        if self._first:
            self._before.clear()
            self._before.update(own)
        else:
            self._set_back(own)
        super().__call__(index, grad, weight)

    def _set_back(self, own: Dict[str, Any]) -> None:
        for name in [name for name, value in own.items() if _is_number(value)]:
            if name not in self._before:
                del own[name]  # the first device has made it, from a value of its class
        own.update((k, v) for k, v in self._before.items() if _is_number(v))


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, numbers.Number)
