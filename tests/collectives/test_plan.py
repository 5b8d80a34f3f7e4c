"""Bad input is an error on all ranks when a plan is made, and the next collective works."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest

from gluon_esgd.collectives import allreduce, plan, shared_array
from gluon_esgd.communicator import Communicator
from gluon_esgd.errors import CollectiveError

from ..pool import Pools, Shape
from .expectations import name_of, on_nodes

# Whoever waits for a rank that raised alone gives up before the pool does.
LIMITED = (("GLUON_ESGD_STALL_ABORT_S", "3"),)
THREE = Shape(3, settings=LIMITED)
TWO_AND_ONE = Shape(3, settings=(*LIMITED, *on_nodes(2, 1).settings))

Call = Tuple[str, Any, Dict[str, Any]]


def _call(vectors: Any, collective: str = "allreduce", **more: Any) -> Call:
    return collective, vectors, more


def _read_only() -> np.ndarray:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    return array


# What one rank brings, and what the message says of it: argument, value, what is allowed.
FAULTS: Dict[str, Tuple[Callable[[], Call], List[str]]] = {
    "strided": (
        lambda: _call(np.ones(8, np.float32)[::2]),
        ["1-d, contiguous and writeable", "shape (4,), strides (8,)"],
    ),
    "reversed": (lambda: _call(np.ones(8, np.float32)[::-1]), ["contiguous", "strides (-4,)"]),
    "read-only": (lambda: _call(_read_only()), ["writeable", "writeable=False"]),
    "2-d": (lambda: _call(np.ones((2, 2), np.float32)), ["1-d", "shape (2, 2)"]),
    "0-d": (lambda: _call(np.array(1.0, np.float32)), ["1-d", "shape ()"]),
    "bool": (lambda: _call(np.ones(4, bool)), ["float16, float32, float64, int32, int64", "bool"]),
    "longdouble": (lambda: _call(np.ones(4, np.longdouble)), ["float64", "got float128"]),
    "complex": (lambda: _call(np.ones(4, np.complex64)), ["float64", "got complex64"]),
    "unsigned": (lambda: _call(np.ones(4, np.uint8)), ["int64", "got uint8"]),
    "objects": (lambda: _call(np.ones(4, object)), ["int64", "got object"]),
    "big-endian": (lambda: _call(np.ones(4, ">f4")), ["float32", "got >f4"]),
    "no array": (lambda: _call(3.5), ["numpy or CuPy array", "got float"]),
    "nothing": (lambda: _call(None), ["numpy or CuPy array", "got NoneType"]),
    "list of numbers": (lambda: _call([1.0, 2.0]), ["numpy or CuPy array", "got float"]),
    "empty list": (lambda: _call([]), ["vectors is an empty list", "give one vector"]),
    "two lengths": (
        lambda: _call([np.ones(4, np.float32), np.ones(5, np.float32)]),
        ["vectors must be of one type and length", "float32 of shape (4,), float32 of shape (5,)"],
    ),
    "two types": (
        lambda: _call([np.ones(4, np.float32), np.ones(4, np.float64)]),
        ["vectors must be of one type and length", "float64 of shape (4,)"],
    ),
    "unknown op": (
        lambda: _call(np.ones(4, np.float32), op="average"),
        ["op='average' must be one of sum, mean, min, max, weighted_mean, weighted_sum"],
    ),
    "op of another type": (lambda: _call(np.ones(4, np.float32), op=["sum"]), ["op=['sum']"]),
    "unknown algorithm": (
        lambda: _call(np.ones(4, np.float32), algorithm="tree"),
        ["algorithm='tree' must be one of auto, ", "library", "ring", "shared"],
    ),
    "algorithm of another collective": (
        lambda: _call(np.ones(4, np.float32), "broadcast", algorithm="ring"),
        ["algorithm='ring' must be one of auto, ", "library, local"],
    ),
    "unknown collective": (
        lambda: _call(np.ones(4, np.float32), "scatter"),
        ["collective='scatter' must be one of allreduce, broadcast, reduce_scatter, allgather"],
    ),
    "root too large": (
        lambda: _call(np.ones(4, np.float32), "broadcast", root=3),
        ["root=3 must be a rank, 0 to 2"],
    ),
    "negative root": (
        lambda: _call(np.ones(4, np.float32), "broadcast", root=-1),
        ["root=-1 must be a rank, 0 to 2"],
    ),
    "root of another type": (
        lambda: _call(np.ones(4, np.float32), "broadcast", root="first"),
        ["root='first'", "0 to 2"],
    ),
    "root that is no integer": (
        lambda: _call(np.ones(4, np.float32), "broadcast", root=0.5),
        ["root=0.5", "0 to 2"],
    ),
    "no room for weights": (
        lambda: _call(np.ones(1, np.float32), op="weighted_mean"),
        ["op='weighted_mean'", "allreduce of at least 2 elements"],
    ),
    "weights of a part": (
        lambda: _call(np.ones(4, np.float32), "reduce_scatter", op="weighted_mean"),
        ["op='weighted_mean' is for an allreduce", "got a reduce_scatter"],
    ),
    "sums of weights of a part": (
        lambda: _call(np.ones(4, np.float32), "reduce_scatter", op="weighted_sum"),
        ["op='weighted_sum' is for an allreduce", "got a reduce_scatter"],
    ),
    "unknown compression": (
        lambda: _call(np.ones(4, np.float32), compression="bf16"),
        ["compression='bf16' must be None or 'fp16'"],
    ),
    "compression of another type": (
        lambda: _call(np.ones(4, np.float32), compression=["fp16"]),
        ["compression=['fp16'] must be None or 'fp16'"],
    ),
    "compressed integers": (
        lambda: _call(np.ones(4, np.int32), compression="fp16"),
        ["compression='fp16' is for vectors of float32 or float64, got int32"],
    ),
    "compressed half floats": (
        lambda: _call(np.ones(4, np.float16), compression="fp16"),
        ["compression='fp16' is for vectors of float32 or float64, got float16"],
    ),
    "compressed broadcast": (
        lambda: _call(np.ones(4, np.float32), "broadcast", compression="fp16"),
        ["compression='fp16' is for an allreduce, got a broadcast"],
    ),
    "compressed reduce_scatter": (
        lambda: _call(np.ones(4, np.float32), "reduce_scatter", compression="fp16"),
        ["compression='fp16' is for an allreduce, got a reduce_scatter"],
    ),
}

_GOOD: Call = _call(np.ones(4, np.float32))


def _try(call: Call) -> Tuple[str, List[float]]:
    """Make a plan; return what its error says, and what an allreduce gives afterwards."""
    from gluon_esgd import world

    comm = world().comm
    collective, vectors, more = call
    said = "no error"
    try:
        plan(collective, vectors, comm, what="a test", **more)
    except ValueError as error:
        said = str(error)
    after = np.full(3, comm.rank + 1.0)
    allreduce(after, comm)
    return said, after.tolist()


def _one_is_wrong(fault: str, bad: int) -> Tuple[str, List[float]]:
    from gluon_esgd import world

    return _try(FAULTS[fault][0]() if world().rank == bad else _GOOD)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [THREE], ids=name_of)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_an_error_on_all(pools: Pools, shape: Shape, fault: str) -> None:
    for bad in range(shape.workers):
        results = pools.get(shape).run(_one_is_wrong, fault, bad, timeout=20)
        for said, after in results:
            assert said == results[0][0], "every rank says the same"
            assert said.startswith(f"a test: rank {bad}: "), said
            for part in FAULTS[fault][1]:
                assert part in said
            assert after == [6.0] * 3, "the communicator still works"


@pytest.mark.parametrize("fault", [f for f in FAULTS if "root" not in f])
def test_the_same_on_one_rank_alone(fault: str) -> None:
    collective, vectors, more = FAULTS[fault][0]()
    with pytest.raises(ValueError) as error:
        plan(collective, vectors, Communicator(), **more)
    for part in FAULTS[fault][1]:
        assert part in str(error.value)


# What ranks 0 and 2 bring, what rank 1, and what is said of both.
_F4 = "float32 of shape (4,)"
DIFFERENCES: Dict[str, Tuple[Call, str, str]] = {
    "length": (_call(np.ones(5, np.float32)), _F4, "float32 of shape (5,)"),
    "nothing in it": (_call(np.ones(0, np.float32)), _F4, "float32 of shape (0,)"),
    "dtype": (_call(np.ones(4, np.float64)), _F4, "float64 of shape (4,)"),
    "dtype of the same width": (_call(np.ones(4, np.int32)), _F4, "int32 of shape (4,)"),
    "op": (_call(np.ones(4, np.float32), op="max"), "op='sum'", "op='max'"),
    "algorithm": (
        _call(np.ones(4, np.float32), algorithm="ring"),
        "algorithm='auto'",
        "algorithm='ring'",
    ),
    "root": (_call(np.ones(4, np.float32), root=2), "root=0", "root=2"),
    "compression": (
        _call(np.ones(4, np.float32), compression="fp16"),
        "compression=None",
        "compression='fp16'",
    ),
    "collective": (_call(np.ones(4, np.float32), "allgather"), "allreduce, ", "allgather, "),
}


def _one_differs(name: str) -> Tuple[str, List[float]]:
    from gluon_esgd import world

    return _try(DIFFERENCES[name][0] if world().rank == 1 else _GOOD)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [THREE, TWO_AND_ONE], ids=name_of)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_bring_different_things_are_told_what_each_brought(
    pools: Pools, shape: Shape, name: str
) -> None:
    _, usual, other = DIFFERENCES[name]
    results = pools.get(shape).run(_one_differs, name, timeout=20)
    for said, after in results:
        assert said == results[0][0]
        assert said.startswith("a test: the ranks bring different ones: rank 0, 2: ")
        first, _, second = said.partition("; rank 1: ")
        assert usual in first and other in second and "all must bring the same" in second
        assert after == [6.0] * 3


def _all_ask(algorithm: str, **more: Any) -> Tuple[str, List[float]]:
    return _try(_call(np.ones(4, np.float32), algorithm=algorithm, **more))


def _all_ask_for_half_floats(algorithm: str) -> Tuple[str, List[float]]:
    return _all_ask(algorithm, compression="fp16")


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [THREE, TWO_AND_ONE], ids=name_of)
def test_what_adds_up_in_messages_cannot_compress_them(pools: Pools, shape: Shape) -> None:
    for said, after in pools.get(shape).run(_all_ask_for_half_floats, "library"):
        if shape == THREE:
            assert said == "no error", "nothing leaves the machine"
        else:
            assert "rank 0, 1, 2: algorithm='library' adds up what it sends" in said
            assert "use 'auto' (or unset GLUON_ESGD_ALGORITHM), 'hierarchical' or 'ring'" in said
            assert "or compression=None (or unset GLUON_ESGD_COMPRESSION)" in said
        assert after == [6.0] * 3


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [TWO_AND_ONE], ids=name_of)
def test_shared_is_for_one_machine(pools: Pools, shape: Shape) -> None:
    for said, after in pools.get(shape).run(_all_ask, "shared"):
        assert "rank 0, 1, 2: algorithm='shared' is for the ranks of one machine" in said
        assert "these are on 2; use 'hierarchical' or 'auto'" in said
        assert after == [6.0] * 3


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [THREE], ids=name_of)
def test_local_is_for_one_rank(pools: Pools, shape: Shape) -> None:
    for said, after in pools.get(shape).run(_all_ask, "local"):
        assert "algorithm='local' is for one rank, and there are 3" in said
        assert after == [6.0] * 3


def _lengths_of_memory(bad: int) -> str:
    from gluon_esgd import world

    comm = world().comm
    try:
        shared_array(1000 if comm.rank == bad else 100_000, np.float32, comm)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.mpi
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("shape", [THREE], ids=name_of)
def test_shared_memory_of_different_lengths(pools: Pools, shape: Shape, bad: int) -> None:
    for said in pools.get(shape).run(_lengths_of_memory, bad, timeout=20):
        assert f"rank {bad}" in said


def _freed() -> List[str]:
    """With a communicator of its own, as every other test needs the world's."""
    from gluon_esgd import world

    comm = Communicator(world().comm.mpi.Dup())
    array = np.ones(3, np.float32)
    made = plan("allreduce", array, comm, algorithm="library")
    comm.mpi.Free()
    said = []
    for call in (lambda: allreduce(array, comm), made, lambda: shared_array(3, "f", comm)):
        try:
            call()
        except CollectiveError as error:
            said.append(str(error))
    return said


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [THREE], ids=name_of)
def test_a_freed_communicator_is_an_error(pools: Pools, shape: Shape) -> None:
    for rank, said in enumerate(pools.get(shape).run(_freed)):
        start = f"rank {rank}: the communicator was freed before "
        earlier = f"rank {rank}: an earlier collective failed"
        named = "an allreduce of float32 of shape (3,), plan 1"
        assert said == [start + "the plan of an allreduce", start + named, earlier]


def test_a_vector_of_nothing_and_of_one_rank() -> None:
    for size in (0, 1):
        array = np.ones(size, np.float32)
        made = plan("allreduce", array, Communicator(), op="mean")
        made()
        assert (
            array.tolist() == [1.0] * size
            and made.what == f"an allreduce of float32 of shape ({size},), plan 1"
        )


def _chosen() -> List[str]:
    from gluon_esgd import world

    comm = world().comm
    return [plan("allreduce", np.ones(n, "f"), comm).algorithm for n in (1, 1000, 1 << 20)]


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [Shape(1), THREE, TWO_AND_ONE], ids=name_of)
def test_a_plan_tells_which_algorithm_was_chosen(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_chosen)
    assert results == [results[0]] * shape.workers
    several = shape == TWO_AND_ONE
    for name in results[0]:
        if shape.workers == 1:
            assert name == "local"
        else:
            assert name in ("hierarchical", "library", "ring", *([] if several else ["shared"]))
