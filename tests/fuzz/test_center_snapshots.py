"""The center on disk: damaged files, read where a leader's control thread reads them."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from gluon_esgd.center.memory import Memory
from gluon_esgd.center.snapshots import Snapshots

from .mutation import bytes_, seeds

SIZE = 40


@pytest.fixture
def kept(tmp_path):
    """A memory, its snapshots, and the file of a whole one."""
    memory, snapshots = Memory.create([SIZE], [(0, SIZE)]), Snapshots(tmp_path, every_s=1000.0)
    memory.buffers[0][:] = np.arange(SIZE)
    memory.set_center(1, 0)
    snapshots.write({"v": (memory, 100.0)})
    (path,) = tmp_path.glob("*.npy")
    return memory, snapshots, path


def test_what_is_damaged_is_named_or_read_as_what_it_says(kept, caplog):
    memory, snapshots, path = kept
    whole, refused = path.read_bytes(), 0
    for _, random in seeds(0, 400):
        path.write_bytes(bytes_(random, whole, b"PK\x03\x04"))
        memory.x[:] = -1
        if not snapshots.read("v", memory):
            refused += 1
            assert (memory.x == -1).all()
    assert refused > 200
    assert caplog.text.count("and is not used") == refused


@pytest.mark.parametrize(
    ("shape", "fault"),
    [("(10000000000000,)", "holds float32"), ("(40, 1)", "holds float32"), ("(40", "is damaged")],
)
def test_a_head_that_claims_too_much_takes_no_memory(kept, caplog, shape, fault):
    memory, snapshots, path = kept
    caplog.set_level(logging.WARNING)
    head, rest = path.read_bytes()[:128], path.read_bytes()[128:]
    text = head[10:].decode().replace("(40,)", shape).rstrip()[: 128 - 11].ljust(128 - 11) + "\n"
    path.write_bytes(head[:10] + text.encode() + rest)
    assert not snapshots.read("v", memory)
    assert fault in caplog.text
