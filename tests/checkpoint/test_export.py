"""Networks for inference, whole or not there, and the best of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest
from mxnet import gluon

from gluon_esgd.checkpoint import BestExport, export


def network(value: float) -> gluon.HybridBlock:
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.Constant(value))
    net.hybridize()
    net(mx.nd.ones((1, 2)))
    return net


def exported(path: Path) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exported graph says no types
        net = gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")
    return float(net(mx.nd.ones((1, 2))).asscalar())


def test_an_export_can_be_imported(tmp_path: Path) -> None:
    export(network(3.0), str(tmp_path / "new" / "net"))
    export(network(4.0), str(tmp_path / "new" / "net"))
    assert exported(tmp_path / "new" / "net") == 8.0
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: Any) -> None:
    export(network(3.0), str(tmp_path / "net"))
    broken = network(4.0)
    monkeypatch.setattr(type(broken), "export", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        export(broken, str(tmp_path / "net"))
    assert exported(tmp_path / "net") == 6.0


def test_the_best_stays_also_after_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "best")
    best = BestExport(path)
    assert best.offer(network(1.0), 0.5) and best.offer(network(2.0), 0.7)
    assert not best.offer(network(3.0), 0.7) and not best.offer(network(3.0), float("nan"))
    again = BestExport(path)
    assert again.value == 0.7 and not again.offer(network(4.0), 0.6)
    assert exported(tmp_path / "best") == 4.0
    assert again.offer(network(5.0), 0.8) and exported(tmp_path / "best") == 10.0


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text("[]")
    with pytest.raises(ValueError, match=r"best\.json is not what BestExport writes"):
        BestExport(str(tmp_path / "best"))
