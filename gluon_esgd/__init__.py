"""Elastic Averaging SGD for MXNet Gluon: change ``gluon.Trainer`` to `ElasticTrainer`.

Importing this package starts nothing: MXNet, MPI and CuPy are loaded when a
name that needs them is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, List

__version__ = "0.1.0.dev0"
"""Version of the package, by Semantic Versioning."""

if TYPE_CHECKING:
    from .log import get_logger as get_logger
    from .metrics import metric_average as metric_average
    from .optim import ElasticSGD as ElasticSGD
    from .ranks import barrier as barrier
    from .ranks import broadcast_object as broadcast_object
    from .ranks import broadcast_parameters as broadcast_parameters
    from .ranks import local_context as local_context
    from .topology import World as World
    from .topology import world as world
    from .trainer import ElasticTrainer as ElasticTrainer

_HOME = {
    "ElasticSGD": ".optim",
    "ElasticTrainer": ".trainer",
    "World": ".topology",
    "barrier": ".ranks",
    "broadcast_object": ".ranks",
    "broadcast_parameters": ".ranks",
    "get_logger": ".log",
    "local_context": ".ranks",
    "metric_average": ".metrics",
    "world": ".topology",
}

__all__ = [
    "ElasticSGD",
    "ElasticTrainer",
    "World",
    "__version__",
    "barrier",
    "broadcast_object",
    "broadcast_parameters",
    "get_logger",
    "local_context",
    "metric_average",
    "world",
]


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "predict"):
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(_HOME[name], __name__)
    except (AttributeError, ImportError) as error:
        _explain(error)
        raise
    return getattr(home, name)


def _explain(error: Exception) -> None:
    """Raise in its place what helps where `error` came from importing MXNet."""
    import sys
    from importlib.metadata import PackageNotFoundError, version

    if "mxnet" in sys.modules:
        return
    try:
        numpy = version("numpy")
    except PackageNotFoundError:
        numpy = "missing"
    raise ImportError(
        f"MXNet cannot be imported ({error}): it needs numpy below 1.24, which is {numpy}, and "
        f"Python 3.8 to 3.11, which is {sys.version.split()[0]}; "
        "pip install mxnet==1.9.1 'numpy<1.24'"
    ) from error


def __dir__() -> List[str]:
    return sorted(__all__)
