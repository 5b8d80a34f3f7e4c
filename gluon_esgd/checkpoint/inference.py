"""Networks for inference: each file is there as a whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mxnet import gluon

from ..durable import write_whole
from ..resume import on_leader
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

    Making one and all methods are collective in the client; its leader reads and writes.

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
        On all ranks of the client: ``{path}.json`` cannot be read, or is something else.
    """

    def __init__(self, path: str) -> None:
        self._path, self._world = path, world()
        self.value = float("-inf")
        on_leader(self._world, self._read)
        # As text: JSON has no infinity.
        self.value = float(self._world.broadcast(repr(self.value)))

    def _read(self) -> None:
        try:
            with open(f"{self._path}.json") as file:
                self.value = float(json.load(file)["value"])
        except FileNotFoundError:
            pass
        except (KeyError, TypeError, ValueError) as error:
            what = f"{self._path}.json is not what BestExport writes"
            raise ValueError(f"{what}: {error!r}") from None

    def offer(self, net: gluon.HybridBlock, value: float) -> bool:
        """Export `net` if `value` is higher than all before; return whether it is.

        Parameters
        ----------
        net : HybridBlock
        value : float
            The same on all ranks.

        Raises
        ------
        OSError
            On all ranks of the client: it could not be written.
        """
        if not value > self.value:
            return False
        self.value = value
        on_leader(self._world, lambda: self._write(net, value))
        return True

    def _write(self, net: gluon.HybridBlock, value: float) -> None:
        export(net, self._path)
        write_whole(Path(f"{self._path}.json"), json.dumps({"value": value}).encode())
