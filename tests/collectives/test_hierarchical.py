"""Each machine sends 2 (N - 1) / N of one vector to others, by the ranks that all of them have."""

from __future__ import annotations

from typing import List

import numpy as np
import pytest

from gluon_esgd.collectives import plan
from gluon_esgd.communicator import Communicator

from ..pool import OPEN_MPI_PYTHON, Pools, Shape
from .expectations import Case, memory, name_of, on_nodes

NODES = [(2, 2), (3, 1), (1, 3), (2, 1), (1, 1, 1, 1), (1, 1), (2, 2, 2)]
SHAPES = [on_nodes(*nodes) for nodes in NODES]
SHAPES.append(on_nodes(2, 1)._replace(python=OPEN_MPI_PYTHON))


def _sent(size: int, dtype: str, op: str, where: str) -> int:
    from gluon_esgd import world

    comm = world().comm
    room = memory(Case(size, dtype, op, where), 1, comm)[0]
    room[:] = 1
    made = plan("allreduce", room, comm, op=op, algorithm="hierarchical")
    before = comm.sent_bytes
    made()
    assert (room[:-2] == (comm.size if op == "sum" else 1)).all()
    return comm.sent_bytes - before


def _by_node(sent: List[int], nodes: List[int]) -> List[List[int]]:
    starts = np.cumsum([0, *nodes])
    return [sent[a:b] for a, b in zip(starts, starts[1:])]


def _nodes(shape: Shape) -> List[int]:
    return [int(n) for n in dict(shape.settings)["GLUON_ESGD_NODES"].split(",")]


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["private", "shared"])
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_bytes_between_nodes(pools: Pools, shape: Shape, where: str) -> None:
    nodes = _nodes(shape)
    count, owners = len(nodes), min(nodes)
    # Every part can be cut evenly; what is larger goes in chunks, each of which is rounded.
    for size in (24, 24_000, *([24 << 14] if where == "shared" else [])):
        sent = _by_node(pools.get(shape).run(_sent, size, "float32", "sum", where), nodes)
        for ranks in sent:
            assert sum(ranks) * count == 2 * (count - 1) * size * 4, (size, sent)
            assert all(ranks[:owners]) and not any(ranks[owners:])


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [on_nodes(2, 2), on_nodes(3, 1)], ids=name_of)
def test_bytes_of_what_cannot_be_cut_evenly(pools: Pools, shape: Shape) -> None:
    """Parts differ by an element, tails travel with each part, half floats as float32."""
    nodes = _nodes(shape)
    count, owners = len(nodes), min(nodes)
    for size, dtype, op, width in (
        (1001, "float64", "sum", 8),
        (1001, "float64", "weighted_mean", 8),
        (1001, "float16", "sum", 4),
        (5, "int32", "sum", 4),
    ):
        for ranks in _by_node(pools.get(shape).run(_sent, size, dtype, op, "shared"), nodes):
            far = sum(ranks) / width - 2 * (count - 1) / count * size
            tail = 2 if op == "weighted_mean" else 0
            assert abs(far) <= owners * 2 * (count - 1) * (1 + tail), (size, dtype, op)


def _broadcast(size: int, root: int) -> int:
    from gluon_esgd import world

    comm = world().comm
    room = memory(Case(size, "float32", "sum", "shared"), 1, comm)[0]
    room[:] = comm.rank
    made = plan("broadcast", room, comm, root=root, algorithm="hierarchical")
    before = comm.sent_bytes
    made()
    assert (room == root).all()
    return comm.sent_bytes - before


@pytest.mark.mpi
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_bytes_of_a_broadcast(pools: Pools, shape: Shape) -> None:
    """Each machine passes one vector on, but the last."""
    nodes, size = _nodes(shape), 24 << 14
    for root in (0, shape.workers - 1):
        sent = pools.get(shape).run(_broadcast, size, root)
        of_nodes = [sum(ranks) for ranks in _by_node(sent, nodes)]
        last = len(nodes) - 1 if root == 0 else len(nodes) - 2
        assert of_nodes == [0 if k == last else 4 * size for k in range(len(nodes))]


def _peers() -> int:
    from gluon_esgd import world

    peers = world().comm.peers
    return 0 if peers is None else peers.size


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(3), *SHAPES], ids=name_of)
def test_only_ranks_that_every_node_has_take_part_between_nodes(pools: Pools, shape: Shape) -> None:
    nodes = _nodes(shape) if shape.settings else [shape.workers]
    peers = [len(nodes) if k < min(nodes) else 0 for n in nodes for k in range(n)]
    assert pools.get(shape).run(_peers) == (peers if len(nodes) > 1 else [0] * shape.workers)


def _alike() -> bytes:
    from gluon_esgd import world

    comm = world().comm
    room = np.random.RandomState(comm.rank).randn(1001)
    plan("allreduce", room, comm, op="mean", algorithm="hierarchical")()
    return room.tobytes()


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [on_nodes(2, 2), on_nodes(3, 1)], ids=name_of)
def test_bits_are_the_same_on_all_nodes_and_from_run_to_run(pools: Pools, shape: Shape) -> None:
    results = [row for _ in range(3) for row in pools.get(shape).run(_alike)]
    assert len(set(results)) == 1
    right = np.mean([np.random.RandomState(rank).randn(1001) for rank in range(4)], axis=0)
    assert np.allclose(np.frombuffer(results[0]), right, rtol=1e-12)


def test_one_rank_sends_nothing() -> None:
    comm = Communicator()
    plan("allreduce", np.ones(3), comm, algorithm="hierarchical")()
    assert comm.sent_bytes == 0
