"""Clients of one machine take GPUs of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import List, Tuple

import pytest

from gluon_esgd.launch.gpus import gpus_of, mates, share

from ..pool import ROOT, environment

EIGHT = [str(k) for k in range(8)]


@pytest.mark.parametrize(
    "gpus, clients, size, seen",
    [
        (8, 2, 4, ["0123", "4567"]),
        (8, 4, 2, ["01", "23", "45", "67"]),
        (8, 8, 1, list("01234567")),
        (8, 2, 2, ["0145", "2367"]),  # two of each rank, the first ones first
        (3, 2, 1, ["0", "1"]),
        (2, 2, 2, ["01", "01"]),  # more ranks than GPUs
        (2, 4, 1, ["0", "1", "0", "1"]),
    ],
)
def test_all_clients_of_a_machine_share_its_gpus(
    gpus: int, clients: int, size: int, seen: List[str]
) -> None:
    workers = clients * size
    found = [share(EIGHT[:gpus], range(k * size, (k + 1) * size), workers) for k in range(clients)]
    assert ["".join(names) for names in found] == seen
    by_rank = [found[w // size][w % size % len(found[w // size])] for w in range(workers)]
    assert len(set(by_rank)) == min(gpus, workers), "each rank takes its local_rank'th"


def test_a_client_that_is_added_takes_what_is_free() -> None:
    before = [share(EIGHT[:4], range(k, k + 1), 2)[0] for k in range(2)]
    assert share(EIGHT[:4], range(2, 3), 3)[0] not in before


def test_ranks_on_one_machine_are_found_among_those_of_a_client() -> None:
    places: List[Tuple[int, int]] = [(2, 4), (3, 4), (0, 2), (1, 2)]
    assert mates(places, 0) == mates(places, 1) == (range(2, 4), 4)
    assert mates(places, 2) == mates(places, 3) == (range(0, 2), 2)
    assert mates([(0, 1)], 0) == (range(0, 1), 1)


def test_the_gpus_of_a_machine(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus_of({}, str(tmp_path)) == ["0", "1", "2"]  # CUDA counts what it sees
    assert gpus_of({"CUDA_VISIBLE_DEVICES": "5,GPU-a1"}, str(tmp_path)) == ["5", "GPU-a1"]
    assert gpus_of({"CUDA_VISIBLE_DEVICES": ""}, str(tmp_path)) == []
    assert gpus_of({}, str(tmp_path / "none")) == []


@pytest.mark.parametrize(
    "options, seen",
    [
        (["--clients", "2", "--servers", "1", "--bind", "none"], ["0,1", "0,1", "2,3", "2,3"]),
        (["--clients", "1"], ["0,1,2,3"] * 4),
        (["--clients", "2", "--servers", "0"], ["0,1", "0,1", "2,3", "2,3"]),
    ],
)
def test_ranks_see_the_gpus_of_their_client(
    tmp_path: Path, options: List[str], seen: List[str]
) -> None:
    write = "import os, sys; from gluon_esgd import settings as s; from pathlib import Path; "
    write += "from gluon_esgd.launch.rank import place_of, rank_of; "
    write += "Path(sys.argv[1], '%d.%d' % place_of(s.read(), rank_of(os.environ)))"
    write += ".write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    job = ["-n", "4", *options, "--job-dir", str(tmp_path / "job")]
    script = [sys.executable, "-c", write, str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "gluon_esgd.launch", *job, *script],
        env=environment(CUDA_VISIBLE_DEVICES="0,1,2,3"),
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    assert [path.read_text() for path in sorted(tmp_path.glob("?.?"))] == seen
