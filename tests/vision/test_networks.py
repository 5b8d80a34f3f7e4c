"""Networks by name, and residual blocks that begin as the identity."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import mxnet as mx
import pytest
from mxnet.gluon import nn

from gluon_esgd.vision import get_network, zero_last_gamma


@pytest.mark.parametrize(
    "name, size, blocks",
    [
        ("small", 8, 0),
        ("resnet18_v1", 32, 8),
        ("resnet50_v1", 32, 16),
        ("resnet18_v2", 32, 0),
        ("mobilenet0.25", 32, 0),
    ],
)
def test_networks_of_the_zoo(name: str, size: int, blocks: int) -> None:
    net = get_network(name, 7)
    assert zero_last_gamma(net) == blocks
    net.initialize()
    assert net(mx.nd.zeros((1, 3, size, size))).shape == (1, 7)
    gammas = net.collect_params(".*gamma").values()
    zero = {param.name for param in gammas if not param.data().asnumpy().any()}
    stages = net.features[4:8] if blocks else []
    assert zero == {block.body[-1].gamma.name for stage in stages for block in stage}


def test_a_block_with_gamma_zero_is_the_identity() -> None:
    net = get_network("resnet18_v1", 3)
    zero_last_gamma(net)
    net.initialize()
    block = net.features[4][0]  # without a shortcut of its own
    x = mx.nd.abs(mx.nd.random.normal(shape=(1, 64, 8, 8)))
    assert (block(x).asnumpy() == x.asnumpy()).all()


@pytest.mark.parametrize(
    "name, found", [("BottleneckV1b", 1), ("Bottleneck", 1), ("BasicBlockV2", 0), ("MyBlock", 0)]
)
def test_blocks_of_other_libraries(name: str, found: int) -> None:
    block = type(name, (nn.HybridSequential,), {})()
    block.norm, block.last, block.downsample = nn.BatchNorm(), nn.BatchNorm(), nn.BatchNorm()
    net = nn.HybridSequential()
    net.add(block)
    assert zero_last_gamma(net) == found
    begins = [norm.gamma.init for norm in (block.norm, block.last, block.downsample)]
    assert begins == ["ones", "zeros" if found else "ones", "ones"]


def test_an_unknown_name_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gluoncv", None)
    with pytest.raises(ValueError) as error:
        get_network("resnet51", 10)
    assert "name='resnet51' must be small or one of alexnet, densenet121" in str(error.value)
    assert "resnet50_v1" in str(error.value) and "pip install gluoncv" in str(error.value)


def test_networks_of_gluoncv_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    zoo: Any = ModuleType("gluoncv.model_zoo")
    zoo.get_model_list = lambda: ["resnet50_v1b"]
    zoo.get_model = lambda name, **kwargs: made.append((name, kwargs)) or SimpleNamespace()
    monkeypatch.setitem(sys.modules, "gluoncv", ModuleType("gluoncv"))
    monkeypatch.setitem(sys.modules, "gluoncv.model_zoo", zoo)
    get_network("resnet50_v1b", 10)
    assert made == [("resnet50_v1b", {"classes": 10, "pretrained": False})]
    with pytest.raises(ValueError, match="must be small or one of") as error:
        get_network("resnet51", 10)
    assert "pip" not in str(error.value)
