"""What the ranks of a client do after a batch, decided by all of them at the same step."""

from __future__ import annotations

import time
from typing import Optional

from ..topology import World
from .preemption import SAVE, STOP, Signal, Votes

__all__ = ["Decisions"]


class Decisions:
    """When to save inside an epoch, and when to leave.

    Parameters
    ----------
    world : World
    every_steps, every_s : optional
        How often to save, by steps and by the leader's clock.

    Attributes
    ----------
    signal : Signal
    saved_at : float
        By this rank's clock: the last save, or the leader's last vote for one.
    """

    def __init__(self, world: World, every_steps: Optional[int], every_s: Optional[float]) -> None:
        self._world, self._every_steps, self._every_s = world, every_steps, every_s
        self._votes: Optional[Votes] = None
        self._decided = self._steps = 0
        self.signal, self.saved_at = Signal(), time.monotonic()

    def open(self) -> None:
        """Let ranks vote; collective as making `Votes`."""
        self._votes = self._votes or Votes(self._world)

    def begin_epoch(self) -> None:
        """Forget what was decided and not done."""
        self._decided = 0

    def after_step(self) -> None:
        """Vote, and hear what ranks voted for at the step before; collective in the client."""
        assert self._votes is not None
        self._steps += 1
        vote = SAVE if self._is_time() else 0
        self._decided |= self._votes.cast(vote | self._stop)
        if self._every_steps is not None and self._steps >= self._every_steps:
            self._decided |= SAVE

    @property
    def _stop(self) -> int:
        return STOP if self.signal.came else 0

    def _is_time(self) -> bool:
        """Whether the leader votes for a save now; it comes one step later."""
        if self._every_s is None or not self._world.is_leader:
            return False
        now = time.monotonic()
        due = now - self.saved_at >= self._every_s
        self.saved_at = now if due else self.saved_at
        return due

    def take(self) -> int:
        """Return what was decided since the last call: bits `SAVE` and `STOP`."""
        decided, self._decided = self._decided, 0
        return decided

    def saved(self) -> None:
        """Count steps and seconds to the next save from now on."""
        self.saved_at, self._steps = time.monotonic(), 0

    def loaded(self) -> None:
        """Count steps to the next save from now on."""
        self._steps = 0

    def stops_now(self) -> bool:
        """Return whether SIGTERM has come to anybody; collective as `Votes.now`."""
        assert self._votes is not None
        return bool(self._votes.now(self._stop))

    def close(self) -> None:
        """Complete what is under way; collective as `after_step`."""
        assert self._votes is not None
        self._votes.close()
