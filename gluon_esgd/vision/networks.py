"""Networks by name, and how their residual blocks begin."""

from __future__ import annotations

import importlib
import re
from typing import Any, Iterator, List, Optional

from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

__all__ = ["get_network", "zero_last_gamma"]

# A residual block that ends in a BatchNorm, Gluon's and GluonCV's; those of version 2 begin with
# theirs. Without a number: ResNeSt and DLA.
_BLOCK = re.compile(r"(BasicBlock|Bottleneck)(V1\w*)?")


def get_network(name: str, num_classes: int) -> gluon.HybridBlock:
    """Return a network that is not initialized.

    Parameters
    ----------
    name : str
        ``small``, three convolutions that train on a laptop; one of Gluon's model zoo, such as
        ``resnet50_v1``; or one of GluonCV's, such as ``resnet50_v1b``, where that is installed.
    num_classes : int

    Raises
    ------
    ValueError
        On this rank: a name that nobody knows.
    """
    if name == "small":
        return _small(num_classes)
    try:
        return vision.get_model(name, classes=num_classes, pretrained=False)
    except ValueError as error:
        zoo = _gluoncv()
        if zoo is not None and name.lower() in zoo.get_model_list():
            return zoo.get_model(name, classes=num_classes, pretrained=False)
        remedy = "" if zoo else "; pip install gluoncv for those of GluonCV"
        known = re.findall(r"^\s+(\w+)$", str(error), re.M)
        raise ValueError(
            f"name={name!r} must be small or one of {', '.join(sorted(known))}{remedy}"
        ) from None


def _gluoncv() -> Optional[Any]:
    try:
        return importlib.import_module("gluoncv.model_zoo")
    except ImportError:
        return None


def _small(num_classes: int) -> gluon.HybridBlock:
    net = nn.HybridSequential()
    for channels in (32, 64, 128):
        net.add(nn.Conv2D(channels, 3, padding=1, use_bias=False), nn.BatchNorm())
        net.add(nn.Activation("relu"), nn.MaxPool2D(2, padding=1))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(num_classes))
    return net


def zero_last_gamma(net: gluon.Block) -> int:
    """Let the last BatchNorm of each residual block begin with gamma 0; before `initialize`.

    Each block then begins as the identity, as in P. Goyal et al.,
    https://arxiv.org/abs/1706.02677, section 5.1. Blocks whose sum comes before their
    BatchNorm (version 2) are left alone.

    Returns
    -------
    int
        So many blocks were found.
    """
    found = 0
    for block in _blocks(net):
        norms: List[nn.BatchNorm] = [b for b in _own(block) if isinstance(b, nn.BatchNorm)]
        if _BLOCK.fullmatch(type(block).__name__) and norms:
            norms[-1].gamma.init = "zeros"
            found += 1
    return found


def _blocks(block: gluon.Block) -> Iterator[gluon.Block]:
    yield block
    for child in block._children.values():
        yield from _blocks(child)


def _own(block: gluon.Block) -> Iterator[gluon.Block]:
    """All blocks inside `block`, in order, without its shortcut."""
    for name, child in block._children.items():
        if name != "downsample":
            yield from _blocks(child)
