"""What `allreduce.py` compares: the library's own algorithms, and what limits all."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple

import numpy as np

from gluon_esgd.collectives import Plan, allreduce, plan, shared_array
from gluon_esgd.collectives.registry import find, names

__all__ = ["Contestant", "fitting", "limits", "on_devices", "own", "packing"]

# The checked one-shot form is for small vectors; from here on it costs what `auto` costs.
_ONCE_UP_TO_BYTES = 1 << 20


@dataclass
class Contestant:
    """One row of the table for a size.

    Attributes
    ----------
    name : str
    kind : {'own', 'peer', 'limit'}
    run : callable
        One allreduce in place, waited for; on a GPU it may still be under way.
    vectors : list of arrays
        What it adds up on this rank; empty for a limit.
    turn : callable
        A context for each turn; what starts background threads ends them there, so that they
        disturb nobody else.
    """

    name: str
    kind: str
    run: Callable[[], None]
    vectors: List[Any]
    turn: Callable[[], ContextManager] = nullcontext

    @property
    def took(self) -> Optional[str]:
        """The algorithm that a prepared plan has taken."""
        return self.run.algorithm if isinstance(self.run, Plan) else None


def fitting(memory: str, ranks: int, num_nodes: int) -> List[str]:
    """Return the contestants of this library for vectors in `memory`.

    Besides registered names: ``once`` is the checked form `allreduce`, and ``staged`` is
    ``shared`` with a vector in private memory.
    """
    known = [n for n in names("allreduce") if n not in ("auto", "local")]
    if memory == "device":
        known = [n for n in known if find("allreduce", n).memory == "device"]
        return ["auto", *known, *(["ring"] if ranks > 1 else [])]
    known = [n for n in known if find("allreduce", n).memory != "device"]
    if num_nodes > 1:
        return ["auto", "once", *(n for n in known if n != "shared")]
    return ["auto", "once", "staged", *(n for n in known if n != "hierarchical")]


def own(chosen: List[str], private: np.ndarray, comm: Any) -> List[Contestant]:
    """Return this library's contestants; collective.

    Algorithms for memory that ranks share get a vector there, others the `private` one.
    """
    shared = shared_array(private.size, private.dtype, comm)
    made = []
    for name in chosen:
        if name == "once":
            if private.nbytes <= _ONCE_UP_TO_BYTES:
                made.append(Contestant(name, "own", lambda: allreduce(shared, comm), [shared]))
            continue
        algorithm = "shared" if name == "staged" else name
        in_node = name == "auto" or find("allreduce", algorithm).memory == "node"
        vector = shared if in_node and name != "staged" else private
        prepared = plan("allreduce", vector, comm, algorithm=algorithm)
        made.append(Contestant(name, "own", prepared, [vector]))
    return made


def limits(private: np.ndarray) -> List[Contestant]:
    """Return a copy of the vector on every rank at the same time."""
    target = np.ones_like(private)
    return [Contestant("copy", "limit", lambda: np.copyto(target, private), [])]


def on_devices(
    chosen: List[str], vectors: List[Any], comm: Any, left_out: Dict[str, str]
) -> List[Contestant]:
    """Return this library's contestants for vectors on GPUs, and a copy of all; collective.

    What cannot be made here (NCCL with two ranks on one GPU, say) goes into `left_out`.
    """
    import cupy

    made = []
    for name in chosen:
        device = name == "auto" or find("allreduce", name).memory == "device"
        try:
            run = (
                plan("allreduce", vectors, comm, algorithm=name)
                if device
                else _through_host(name, vectors, comm)
            )
        except ValueError as error:  # on all ranks
            left_out[name] = str(error)
            continue
        made.append(Contestant(name, "own", run, vectors))
    targets = []
    for vector in vectors:
        with vector.device:
            targets.append(cupy.ones_like(vector))

    def copy() -> None:
        for target, vector in zip(targets, vectors):
            with vector.device:
                cupy.copyto(target, vector)

    return [*made, Contestant("copy", "limit", copy, [])]


def _through_host(name: str, vectors: List[Any], comm: Any) -> Callable[[], None]:
    """An algorithm for host memory with vectors on GPUs: copied there, and back."""
    copies = [np.empty(vector.shape, vector.dtype) for vector in vectors]
    prepared = plan("allreduce", copies, comm, algorithm=name)

    def run() -> None:
        for vector, copy in zip(vectors, copies):
            vector.get(out=copy)
        prepared()
        for vector, copy in zip(vectors, copies):
            vector.set(copy)

    return run


def packing() -> Tuple[int, Contestant]:
    """Return how many bytes a ResNet-50's 161 gradients are, and packing and unpacking them."""
    sizes = _resnet50()
    flat = np.zeros(sum(sizes), np.float32)
    ends = np.cumsum(sizes)
    places = [flat[end - size : end] for size, end in zip(sizes, ends)]
    gradients = [np.ones(size, np.float32) for size in sizes]

    def run() -> None:
        for place, gradient in zip(places, gradients):
            np.copyto(place, gradient)
        for place, gradient in zip(places, gradients):
            np.copyto(gradient, place)

    return flat.nbytes, Contestant("packing", "limit", run, [])


def _resnet50() -> List[int]:
    """Elements of the parameters: 53 convolutions, 53 x 2 of BatchNorm, 2 of the last layer."""
    sizes: List[int] = []

    def convolution(inputs: int, outputs: int, kernel: int) -> None:
        sizes.extend([inputs * outputs * kernel * kernel, outputs, outputs])

    convolution(3, 64, 7)
    inputs = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(count):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if index == 0:
                convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*sizes, 2048 * 1000, 1000]
