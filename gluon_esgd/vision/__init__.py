"""What recipes that classify pictures share: data, networks, soft labels."""

from __future__ import annotations

from .mixing import mixup, soft_labels
from .networks import get_network, zero_last_gamma
from .pictures import Augmentation, PictureData, input_rate, prepare
from .sources import open_pictures

__all__ = [
    "Augmentation",
    "PictureData",
    "get_network",
    "input_rate",
    "mixup",
    "open_pictures",
    "prepare",
    "soft_labels",
    "zero_last_gamma",
]
