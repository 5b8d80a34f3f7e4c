"""``gluon-esgd doctor``: can this machine run a job, and what to do where it cannot."""

from __future__ import annotations

from typing import Any

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Add ``doctor`` to the subcommands of ``gluon-esgd``."""
    commands.add_parser("doctor").set_defaults(go=lambda options: 0)
