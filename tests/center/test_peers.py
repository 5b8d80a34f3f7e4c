"""The center that leaders hold themselves: closed forms, bits, and what they tell each other."""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest

from gluon_esgd.center import AVERAGED, CARRIED, MOVED, even_chunks
from gluon_esgd.center.peer_mailbox import PeerMailbox
from gluon_esgd.center.peers import PeerLink
from gluon_esgd.communicator import Communicator
from gluon_esgd.errors import CenterError
from gluon_esgd.optim import default_alpha, largest_alpha
from gluon_esgd.optim.outer import Outer, outer_update

from ..pool import OPEN_MPI_PYTHON, Pools, Shape, label

SIZES = [1500, 1, 70, 2000]
N = sum(SIZES)
ALL_MOVED = np.full(len(SIZES), MOVED)
PLAIN = Outer()
EXACT_FROM = 3000  # of the chunks behind it none is moved by an outer step
EPS = float(np.finfo(np.float32).eps)

SEVERAL = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=pytest.mark.mpi)
        for shape in (Shape(2, 2), Shape(3, 3), Shape(4, 4), Shape(3, 3, python=OPEN_MPI_PYTHON))
    ],
    ids=label,
)
THREE = pytest.mark.parametrize("shape", [pytest.param(Shape(3, 3), marks=pytest.mark.mpi)])


def leaders() -> Communicator:
    from gluon_esgd import world

    found = world().leaders
    assert found is not None
    return found


def starts(clients: int) -> List[np.ndarray]:
    """Each client's weights, the same list on all of them."""
    random = np.random.default_rng(7)
    return [random.standard_normal(N).astype(np.float32) for _ in range(clients)]


def seeded(comm: Communicator, outer: Outer = PLAIN) -> Tuple[PeerMailbox, List[np.ndarray]]:
    """A mailbox whose center are the last client's weights, and those of all clients."""
    chunks = even_chunks(N, 1, largest=500)
    exact = [start >= EXACT_FROM for start, _ in chunks]
    box = PeerLink(comm, outer).attach("m", SIZES, chunks, {"n": 4}, exact)
    xs, out = starts(comm.size), np.empty(N, np.float32)
    box.x[:] = xs[comm.rank]
    box.seed(comm.rank == comm.size - 1, out)
    assert out.tobytes() == xs[-1].tobytes()
    return box, xs


def exchange(box: PeerMailbox, x: np.ndarray, alpha: float, kinds: Any = ALL_MOVED) -> np.ndarray:
    shift = np.empty(N, np.float32)
    box.x[:] = x
    box.start_exchange("esgd", alpha, kinds)
    assert box.in_flight and box.collect(shift, 0.0) and not box.in_flight
    return shift


def pulled(box: PeerMailbox, sync: bool = False) -> np.ndarray:
    out = np.empty(N, np.float32)
    box.pull(out, sync=sync)
    return out


def _contract(alpha: float) -> Tuple[np.ndarray, ...]:
    comm = leaders()
    box, xs = seeded(comm)
    moved = xs[comm.rank] + exchange(box, xs[comm.rank], alpha)
    assert box.distance == pytest.approx(np.linalg.norm(xs[comm.rank] - xs[-1]), rel=1e-5, abs=1e-5)
    return moved, pulled(box)


@SEVERAL
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_one_exchange_has_its_closed_form(pools: Pools, shape: Shape, rate: float) -> None:
    p, alpha = shape.clients, rate * largest_alpha(shape.clients)
    results = pools.get(shape).run(_contract, alpha)
    before, after = np.float64(starts(p)), np.float64([x for x, _ in results])
    c0, c1 = before[-1], np.float64(results[0][1])
    close: Dict[str, Any] = {"rtol": 0, "atol": 64 * p * EPS}
    np.testing.assert_allclose(after.sum(0) + c1, before.sum(0) + c0, **close)
    mean0, mean1 = before.mean(0), after.mean(0)
    np.testing.assert_allclose(mean1 - c1, (1 - alpha * (1 + p)) * (mean0 - c0), **close)
    np.testing.assert_allclose(after - mean1, (1 - alpha) * (before - mean0), **close)


def _run(alpha: float, exchanges: int) -> Tuple[List[float], str]:
    """Distances of a client that has no gradient, and a digest of all centers it saw."""
    comm = leaders()
    box, xs = seeded(comm)
    x, distances, seen = xs[comm.rank].copy(), [], hashlib.sha256()
    for _ in range(exchanges):
        x += exchange(box, x, alpha)
        distances.append(box.distance)
        seen.update(pulled(box, sync=True).tobytes())
    assert box.center_version == 1 + exchanges
    return distances, seen.hexdigest()


@SEVERAL
def test_the_default_is_stable_and_centers_have_the_same_bits(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_run, default_alpha(shape.clients), 30)
    assert len({seen for _, seen in results}) == 1
    assert all(distances[-1] < 0.05 * max(distances) for distances, _ in results)


@SEVERAL
@pytest.mark.parametrize(("factor", "grows"), [(0.98, False), (1.02, True)])
def test_the_bound_is_where_it_is_said(
    pools: Pools, shape: Shape, factor: float, grows: bool
) -> None:
    alpha = factor * largest_alpha(shape.clients)
    for distances, _ in pools.get(shape).run(_run, alpha, 120):
        assert (distances[-1] > 2 * distances[5]) is grows, distances[-1] / distances[5]
        assert grows or distances[-1] < 0.5 * distances[5]


def _with_momentum(outer: Outer) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The center after three exchanges, what it should be, and after a second seed."""
    comm = leaders()
    box, xs = seeded(comm, outer)
    alpha, c, v = 0.2, xs[-1].copy(), np.zeros(N, np.float32)
    exact = next(a for a, _ in even_chunks(N, 1, largest=500) if a >= EXACT_FROM)
    for _ in range(3):
        shift = exchange(box, xs[comm.rank], alpha)
        np.testing.assert_allclose(shift, -alpha * (xs[comm.rank] - c), rtol=0, atol=64 * EPS)
        total = np.sum([np.float32(alpha) * (x - c) for x in xs], 0)
        outer_update(c[:exact], total[:exact], v[:exact], outer)
        c[exact:] += total[exact:]
    center = pulled(box)
    box.x[:] = 3
    box.seed(comm.rank == 0, np.empty(N, np.float32))
    exchange(box, np.full(N, 3, np.float32), alpha)  # nothing to add: it stays, or it would roll on
    return center, c, pulled(box)


@THREE
@pytest.mark.parametrize("outer", [Outer(), Outer(0.9, 0.7)], ids=["plain", "momentum"])
def test_the_outer_update_moves_the_center(pools: Pools, shape: Shape, outer: Outer) -> None:
    results = pools.get(shape).run(_with_momentum, outer)
    for center, expected, after_seed in results:
        assert center.tobytes() == results[0][0].tobytes()
        np.testing.assert_allclose(center, expected, rtol=0, atol=512 * EPS)
        assert (after_seed == 3).all()


def _kinds(kinds: List[int]) -> Tuple[np.ndarray, np.ndarray, float]:
    comm = leaders()
    box, xs = seeded(comm)
    shift = exchange(box, xs[-1] + 1 + comm.rank, 0.25, np.array(kinds, np.int8))
    return shift, pulled(box) - xs[-1], box.distance


@THREE
def test_kinds(pools: Pools, shape: Shape) -> None:
    kinds = [MOVED, CARRIED, AVERAGED, MOVED]
    carried = np.repeat(np.array(kinds) == CARRIED, SIZES)
    moved = np.repeat(np.array(kinds) == MOVED, SIZES)
    for client, (shift, change, distance) in enumerate(pools.get(shape).run(_kinds, kinds)):
        assert not shift[carried].any() and not change[carried].any()
        np.testing.assert_allclose(change[~carried], 0.25 * 6, rtol=0, atol=64 * EPS)
        np.testing.assert_allclose(shift[moved], -0.25 * (1 + client), rtol=0, atol=64 * EPS)
        assert distance == pytest.approx((1 + client) * moved.sum() ** 0.5, rel=1e-4)


def _lost(value: float) -> Tuple[bool, float, np.ndarray]:
    comm = leaders()
    box, xs = seeded(comm)
    x = xs[-1] + 1
    if comm.rank == 1:
        x[5] = value
    shift = exchange(box, x, 0.25)
    return bool(shift.any()), box.distance, pulled(box) - xs[-1]


@THREE
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_center_takes_nothing_from_a_client_that_is_lost(
    pools: Pools, shape: Shape, value: float
) -> None:
    results = pools.get(shape).run(_lost, value)
    assert [moved for moved, _, _ in results] == [True, False, True]
    assert [bool(np.isfinite(d)) for _, d, _ in results] == [True, False, True]
    for _, _, change in results:
        np.testing.assert_allclose(change, 0.25 * 2, rtol=0, atol=64 * EPS)


def _sums() -> str:
    comm, chunks = leaders(), even_chunks(N, 1, largest=400)
    box, half = PeerLink(comm).attach("g", [N], chunks, {}), chunks[3][1]
    for round_ in range(6):
        box.x[:] = np.arange(N) % 97 + round_ * (comm.rank + 1)  # integers: sums are exact
        box.reduce(0, half)
        box.reduce(half, N)
        weight = comm.size * (comm.size + 1) // 2
        assert (box.x == comm.size * (np.arange(N) % 97) + round_ * weight).all()
    assert box.bytes_moved == 6 * 4 * N
    box.x[:] = np.random.default_rng(comm.rank).standard_normal(N)
    box.reduce(0, N)
    return hashlib.sha256(box.x.tobytes()).hexdigest()


@SEVERAL
def test_sums_are_exact_and_have_the_same_bits_on_all_clients(pools: Pools, shape: Shape) -> None:
    assert len(set(pools.get(shape).run(_sums))) == 1


def _said(what: str) -> Optional[str]:
    """What a leader hears when clients do not bring the same."""
    comm = leaders()
    odd = comm.rank == 2
    link = PeerLink(comm)
    sizes = [4, 5] if odd and what == "sizes" else [4, 4]
    contract = {"num_parameters": 6 if odd and what == "contract" else 4, "rule": 1}
    if odd and what == "fault":
        contract["big"] = 1 << 24
    seeders = {"two seeders": (0, 2), "no seeder": ()}.get(what, (0,))
    try:
        box = link.attach("m", sizes, even_chunks(sum(sizes), 1), contract)
        box.seed(comm.rank in seeders, np.empty(sum(sizes), np.float32))
        box.center_version += odd and what == "pull"
        box.pull(np.empty(sum(sizes), np.float32), sync=True)
    except CenterError as error:
        return str(error)
    return None


@THREE
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nothing", None),
        ("contract", "the clients do not match: num_parameters: client 0 has 4, client 2 has 6"),
        ("sizes", "floats: client 0 has 8, client 2 has 9"),
        ("fault", "client 2: contract['big']=16777216 must be above"),
        ("two seeders", "seeder: one client must be it, but clients [0, 2] are"),
        ("no seeder", "seeder: one client must be it, but clients [] are"),
        ("pull", "the clients have made [0, 0, 1] exchanges of 'm', by client: all must take"),
    ],
)
def test_all_clients_learn_what_does_not_match(
    pools: Pools, shape: Shape, what: str, says: Optional[str]
) -> None:
    for said in pools.get(shape).run(_said, what):
        assert said is None if says is None else says in str(said)


def test_one_client_and_its_arguments() -> None:
    link, out = PeerLink(Communicator()), np.empty(N, np.float32)
    box = link.attach("m", SIZES, even_chunks(N, link.num_servers, largest=500), {})
    assert not box.last_center(out) and box.center_version == 0
    box.x[:] = 2
    box.seed(True, out)
    assert box.last_center(out) and (out == 2).all() and box.center_version == 1
    shift = exchange(box, np.full(N, 4, np.float32), 0.5)
    assert (shift == -1).all() and (pulled(box) == 3).all()
    with pytest.raises(ValueError, match=r"rule='asgd' must be 'esgd': .* need a server"):
        box.start_exchange("asgd", 0.5, ALL_MOVED)
    with pytest.raises(ValueError, match=r"kinds\[1\]=3 must be"):
        box.start_exchange("esgd", 0.5, np.array([0, 3, 0, 0]))
    with pytest.raises(ValueError, match="out is float64 of shape"):
        box.pull(np.empty(N))
    with pytest.raises(ValueError, match="whole chunks"):
        box.reduce(1, N)
    with pytest.raises(RuntimeError, match="needs an exchange in flight"):
        box.collect(out, 1.0)
    box.start_exchange("esgd", 0.0, ALL_MOVED)
    for call in (lambda: box.pull(out), lambda: box.seed(True, out), lambda: box.reduce(0, N)):
        with pytest.raises(RuntimeError, match="while an exchange is in flight"):
            call()
    assert box.collect(out, 1.0)
    with pytest.raises(CenterError, match="client 0: name='m' is in use; attached are m"):
        link.attach("m", SIZES, even_chunks(N, 1), {})
    with pytest.raises(CenterError, match="client 0: chunks end at 1 but sizes add up to 2"):
        link.attach("new", [2], [(0, 1)], {})
    with pytest.raises(CenterError, match="client 0: exact has 2 entries for 1 chunks"):
        link.attach("new", [2], [(0, 2)], {}, [True, False])
    moved = box.bytes_moved
    link.close()
    link.close()
    with pytest.raises(RuntimeError, match=r"pull\(\) of 'm', which is closed"):
        box.pull(out)
    assert box.bytes_moved == moved > 0
