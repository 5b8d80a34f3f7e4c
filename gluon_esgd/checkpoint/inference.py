"""Networks for inference: each file is there as a whole or not at all."""

from __future__ import annotations

import json
import os

from mxnet import gluon

from ..topology import world

__all__ = ["BestExport", "export"]

_ENDS = ("-symbol.json", "-0000.params")


def export(net: gluon.HybridBlock, path: str) -> None:
    """Write ``{path}-symbol.json`` and ``{path}-0000.params`` by ``net.export``; not collective.

    For ``gluon.SymbolBlock.imports``. Inside ``with trainer.center():`` it is the center.

    Parameters
    ----------
    net : HybridBlock
        Hybridized, and called once.
    path : str
        Folders are made.

    Raises
    ------
    OSError
        On this rank: it cannot be written; what was there before stays.
    RuntimeError
        On this rank, from MXNet: the network was not hybridized or not called.
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    net.export(f"{path}.new")
    for end in _ENDS:
        os.replace(f"{path}.new{end}", f"{path}{end}")


class BestExport:
    """The network that has had the highest value so far, also of a run that was interrupted.

    On leaders; other ranks write nothing.

    Parameters
    ----------
    path : str
        As for `export`; the value is in ``{path}.json``.

    Attributes
    ----------
    value : float
        The highest so far; minus infinity before the first.

    Raises
    ------
    OSError, ValueError
        On this rank: ``{path}.json`` cannot be read, or is something else.
    """

    def __init__(self, path: str) -> None:
        self._path, self.value = path, float("-inf")
        try:
            with open(f"{path}.json") as file:
                self.value = float(json.load(file)["value"])
        except FileNotFoundError:
            pass
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}.json is not what BestExport writes: {error!r}") from None

    def offer(self, net: gluon.HybridBlock, value: float) -> bool:
        """Export `net` if `value` is higher than all before; return whether it is."""
        if not value > self.value:
            return False
        self.value = value
        if world().is_leader:
            export(net, self._path)
            with open(f"{self._path}.json.new", "w") as file:
                json.dump({"value": value}, file)
            os.replace(f"{self._path}.json.new", f"{self._path}.json")
        return True
