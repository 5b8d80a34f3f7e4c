"""Pictures that are on the machine, and a fair share of them for each worker."""

from __future__ import annotations

from .idx import read_idx
from .images import ImageData, load_images
from .sampler import ShardSampler

__all__ = ["ImageData", "ShardSampler", "load_images", "read_idx"]
