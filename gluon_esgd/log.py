"""A logger that does not say everything as often as there are processes."""

from __future__ import annotations

import logging
from typing import Any, MutableMapping, Optional, Tuple

from .topology import world

__all__ = ["RankLogger", "get_logger"]


class RankLogger(logging.LoggerAdapter):
    """What `get_logger` returns."""

    def log(  # type: ignore[override]
        self, level: int, msg: object, *args: Any, main_process_only: bool = True, **kwargs: Any
    ) -> None:
        """Log on the main process, or with ``main_process_only=False`` on all of them."""
        if not self.isEnabledFor(level):
            return
        me = world()
        if not main_process_only:
            msg = f"[client {me.client}, rank {me.rank}] {msg}"
        elif not me.is_main:
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the script's line, not this one
        self.logger.log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> Tuple[Any, Any]:
        """Leave the message as it is."""
        return msg, kwargs


def get_logger(name: Optional[str] = None) -> RankLogger:
    """Return a logger whose messages come from the main process (leader of client 0) only.

    Every process may call its methods; not collective, but the first message looks for `world`,
    which is where nothing else has done so yet.

    Parameters
    ----------
    name : str, optional
        As for ``logging.getLogger``, whose levels and handlers hold.

    Examples
    --------
    >>> from gluon_esgd import get_logger
    >>> logger = get_logger(__name__)
    >>> logger.info("epoch %d", 3)  # once
    >>> logger.info("loss %.3f", 0.1, main_process_only=False)  # with client and rank
    """
    return RankLogger(logging.getLogger(name), {})
