"""Gradients that add up over several backward passes before the ranks meet."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Sequence

from mxnet.gluon import Parameter

__all__ = ["Accumulation"]


class Accumulation:
    """The samples of this rank behind gradients that no step has reduced yet.

    Parameters
    ----------
    params : sequence of Parameter
        The trainer's.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = params
        #: Samples counted since the last update.
        self.samples = 0.0
        #: Whether steps are only counted now.
        self.open = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Only count samples inside; what has been counted outlives the block."""
        _check_adding(self._params)
        outer, self.open = self.open, True
        try:
            yield
        finally:
            self.open = outer

    def refuse(self, call: str) -> None:
        """Raise RuntimeError inside a block: `call` needs gradients of all ranks."""
        if self.open:
            raise RuntimeError(
                f"{call} inside `with trainer.no_sync():`, where ranks do not meet; leave the "
                "block first"
            )


def _check_adding(params: Sequence[Parameter]) -> None:
    for param in params:
        if param.grad_req == "write":
            raise ValueError(
                f"no_sync: parameter {param.name!r} has grad_req='write', so the next backward "
                "pass would overwrite the gradient that is to be kept; set grad_req='add' on all "
                "trainable parameters, and zero gradients after each update"
            )
