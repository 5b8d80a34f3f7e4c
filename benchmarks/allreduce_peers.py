"""Others' allreduce for `allreduce.py`: MPI's own, a plain ring, Gloo, Horovod.

Each adds up a numpy vector in private memory, in place.
"""

import ctypes
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence

import numpy as np
from allreduce_own import Contestant

__all__ = ["NEEDS", "installed", "peers", "start"]

# Name of the peer: the distribution that must be installed, None for none.
NEEDS: Dict[str, Optional[str]] = {
    "mpi_allreduce": None,
    "sendrecv_ring": None,
    "gloo": "torch",
    "horovod": "horovod",
}
# mpi4py knows no half floats.
_WITHOUT_HALF = ("mpi_allreduce", "sendrecv_ring")


def installed(versions: Dict[str, str], dtype: str) -> List[str]:
    """Return the peers that an environment with these `versions` of packages has for `dtype`."""
    found = [name for name, needs in NEEDS.items() if needs is None or needs in versions]
    return [n for n in found if dtype != "float16" or n not in _WITHOUT_HALF]


def start(chosen: Sequence[str], rank: int, size: int, folder: Path) -> None:
    """Load and start what the peers need once; collective."""
    if "gloo" in chosen:  # torch before Horovod: the other way round crashes
        import torch.distributed

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=size
        )
    if "horovod" in chosen:
        import horovod.mxnet  # noqa: F401


def peers(chosen: Sequence[str], vector: np.ndarray) -> List[Contestant]:
    """Return the chosen peers for this `vector`."""
    makers = {
        "mpi_allreduce": _mpi_allreduce,
        "sendrecv_ring": _sendrecv_ring,
        "gloo": _gloo,
        "horovod": _horovod,
    }
    made = [Contestant(n, "peer", makers[n](vector), [vector]) for n in chosen]
    for contestant in made:
        if contestant.name == "horovod":
            contestant.turn = _horovod_turn
    return made


def _mpi_allreduce(vector: np.ndarray) -> Callable[[], None]:
    from mpi4py import MPI

    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, vector)


def _sendrecv_ring(vector: np.ndarray) -> Callable[[], None]:
    """Reduce-scatter, then allgather around a ring of blocking calls, a whole part at a time."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, n = comm.rank, comm.size
    parts = np.array_split(vector, n)
    spare = np.empty_like(parts[0])
    following, before = (rank + 1) % n, (rank - 1) % n

    def run() -> None:
        for step in range(n - 1):
            target = parts[(rank - step - 1) % n]
            came = spare[: target.size]
            comm.Sendrecv(parts[(rank - step) % n], following, recvbuf=came, source=before)
            np.add(target, came, out=target)
        for step in range(n - 1):
            sent, target = parts[(rank - step + 1) % n], parts[(rank - step) % n]
            comm.Sendrecv(sent, following, recvbuf=target, source=before)

    return run


def _gloo(vector: np.ndarray) -> Callable[[], None]:
    import torch

    tensor = torch.from_numpy(vector)
    return lambda: torch.distributed.all_reduce(tensor)


def _horovod(vector: np.ndarray) -> Callable[[], None]:
    import horovod.mxnet as hvd
    import mxnet as mx

    tensor = mx.nd.from_numpy(vector[:], zero_copy=True)  # the view becomes read-only, not `vector`

    def run() -> None:
        hvd.allreduce_(tensor, op=hvd.Sum, name="vector")
        tensor.wait_to_read()

    return run


@contextmanager
def _horovod_turn() -> Iterator[None]:
    """Start Horovod's background thread, and end it: it talks to the other ranks all the time.

    Its fair form: under Open MPI that thread gives up its core while it waits.
    """
    import horovod.mxnet as hvd

    yields = _open_mpi_yields()
    before = yields(True) if yields else None
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        if yields:
            yields(before)


def _open_mpi_yields() -> Optional[Callable[[Optional[bool]], bool]]:
    """What the parameter ``mpi_yield_when_idle`` calls; a run of its own would need no such thing.

    Set for the whole job it would double the time of a small MPI_Allreduce.
    """
    from mpi4py import MPI

    if "Open MPI" not in MPI.Get_library_version():
        return None
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    library = next(file for file in files if Path(file).name.startswith("libopen-pal.so"))
    function = ctypes.CDLL(library).opal_progress_set_yield_when_idle
    function.argtypes, function.restype = [ctypes.c_bool], ctypes.c_bool
    return function
