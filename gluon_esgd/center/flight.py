"""An exchange in flight, and what becomes of it when its generation ends."""

from __future__ import annotations

from typing import Optional

import numpy as np

from .generation import Generation, Request
from .layout import CARRIED, kind_spans
from .memory import ACKNOWLEDGED, PUSHING, Memory

__all__ = ["ASIDE", "BACK", "BUSY", "FAILED", "FLYING", "LOST", "Flight"]

# BACK: the shift lies in the buffers. BUSY: somebody copies it. ASIDE: it lies in the flight.
FLYING, BACK, BUSY, ASIDE, LOST, FAILED = "flying", "back", "busy", "aside", "lost", "failed"


class Flight:
    """One exchange, from its start until it is collected.

    The control thread alone moves it on from `FLYING`. From `BACK` it is moved under the
    state's lock, by whoever copies the shift.

    Parameters
    ----------
    serial : int
        Its number in the memory's header.
    rule : {'esgd', 'asgd'}
    memory : Memory
    generation : Generation
    request : Request
    """

    def __init__(
        self, serial: int, rule: str, memory: Memory, generation: Generation, request: Request
    ) -> None:
        self.rule, self.generation = rule, generation
        self._serial, self._memory, self._request = serial, memory, request
        self.state = FLYING
        self.shift: Optional[np.ndarray] = None

    @property
    def error(self) -> str:
        """What the agent said in place of an acknowledgement."""
        return self._request.error or ""

    @property
    def uses_buffers(self) -> bool:
        """Whether the buffers must stay as they are."""
        return self.state in (FLYING, BACK, BUSY)

    def copied_shift(self) -> np.ndarray:
        """Return a copy of the shift, from the buffers."""
        return self._memory.copy_shift(self.rule, np.empty(self._memory.size, np.float32))

    def land(self) -> None:
        """Move on from `FLYING`, if the answer is there or the agent is dead."""
        if self.state != FLYING:
            return
        if self._request.done:
            self.state = BACK
        elif self._request.error is not None:
            self.state = FAILED
        elif self._request.lost and self.generation.agent.ended:
            self.state = self._fate()

    def _fate(self) -> str:
        """What the memory says of an exchange whose agent is dead; keep the sums right."""
        serial, stage = self._memory.stage
        if serial != self._serial or stage < PUSHING:
            return LOST  # the servers have nothing of it
        if self.rule == "esgd":
            return BACK if stage == ACKNOWLEDGED else LOST
        # It has arrived, or may have, and is not to be sent again: count from here on.
        memory = self._memory
        for kind, start, stop in kind_spans(memory.sizes.tolist(), memory.kinds.tolist()):
            if kind != CARRIED:
                memory.base[start:stop] = memory.x[start:stop]
        return LOST
