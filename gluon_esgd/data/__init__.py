"""Pictures that are on the machine, a fair share of them for each worker, and sound files."""

from __future__ import annotations

from .idx import read_idx
from .images import ImageData, load_images
from .packing import BrokenPicturesError, PackedFolder, pack_folder
from .record_loader import RecordLoader
from .record_shard import EqualBatches, RecordShard, record_shard
from .records import check_records, copy_good_records, write_index
from .sampler import ShardSampler

__all__ = [
    "BrokenPicturesError",
    "EqualBatches",
    "ImageData",
    "PackedFolder",
    "RecordLoader",
    "RecordShard",
    "ShardSampler",
    "check_records",
    "copy_good_records",
    "load_images",
    "pack_folder",
    "read_idx",
    "record_shard",
    "write_index",
]
