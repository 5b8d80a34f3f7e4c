"""The launcher: a `JobSpec` is checked, planned as data, and run. Standard library only."""

from __future__ import annotations

from .plan import Process, Site, plan
from .spec import JobSpec

__all__ = ["JobSpec", "Process", "Site", "plan"]
