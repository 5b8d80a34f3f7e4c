"""What all clients of a job must have in common, compared through the store itself.

Every client writes one row; the sum of all rows, each alone in its place, is a
table that every client can pull. So all of them see the same faults. Without
servers the leaders gather the rows.
"""

from __future__ import annotations

import zlib
from typing import Dict, List, Mapping, Sequence, Tuple

import numpy as np

__all__ = [
    "LIMIT",
    "MOST",
    "WIDTH",
    "check_contract",
    "checksum",
    "faults",
    "own_contract",
    "row",
    "table_shape",
]

LIMIT = 1 << 24
MOST = 60  # entries
_HEAD = 3  # present, seeder, checksum of the entries' names
WIDTH = 2 * (MOST + _HEAD)
_HALF = 1 << 23  # integers below it, and their sums with zeros, are exact in float32


def table_shape(num_clients: int) -> Tuple[int, int]:
    """Return the shape of the table of all clients' rows."""
    return num_clients, WIDTH


def check_contract(contract: Mapping[str, int], own: int) -> None:
    """Raise unless `contract` holds small ints and leaves room for `own` more entries."""
    for name, value in contract.items():
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"contract has an entry named {name!r:.60}; names are printable texts")
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(
                f"contract[{name!r:.60}]={value!r:.60} must be an int; use a checksum or index"
            )
        if not -LIMIT < value < LIMIT:
            raise ValueError(
                f"contract[{name!r:.60}]={value!r:.60} must be above -2**24 and below 2**24; "
                "use a shorter checksum"
            )
    if len(contract) + own > MOST:
        raise ValueError(
            f"contract has {len(contract)} entries, {MOST - own} at most; "
            "put several into one checksum"
        )


def checksum(text: str) -> int:
    """Return a number for `text` that a contract can hold."""
    return zlib.crc32(text.encode(errors="surrogatepass")) % LIMIT


def own_contract(
    sizes: Sequence[int], chunks: Sequence[Tuple[int, int]], exact: Sequence[bool] = ()
) -> Dict[str, int]:
    """Return the entries that are compared without being asked for."""
    cut = np.array([*np.ravel(chunks), *exact], np.int64)
    return {
        "floats": int(sum(sizes)),
        "chunks": len(chunks),
        "sizes (checksum)": zlib.crc32(np.array(sizes, np.int64).tobytes()),
        "cuts (checksum)": zlib.crc32(cut.tobytes()),
    }


def row(contract: Mapping[str, int], seeder: bool) -> np.ndarray:
    """Return one client's row: each integer as two floats, high and low half."""
    names = sorted(contract)
    checksum = zlib.crc32("\0".join(names).encode())
    values = [1, int(seeder), checksum, *(int(contract[name]) for name in names)]
    out = np.zeros(WIDTH, np.float32)
    for i, value in enumerate(values):
        out[2 * i : 2 * i + 2] = divmod(value, _HALF)
    return out


def faults(table: np.ndarray, contract: Mapping[str, int]) -> List[str]:
    """Return what the clients' rows in `table` do not have in common, one sentence each."""
    values = table[:, ::2].astype(np.int64) * _HALF + table[:, 1::2].astype(np.int64)
    missing = [i for i, present in enumerate(values[:, 0]) if present != 1]
    if missing:
        return [f"client {missing[0]} did not state its entries"]
    if len(set(values[:, 2])) > 1:
        return [_differing("names of the entries (checksum)", values[:, 2])]
    found = [
        _differing(name, column)
        for name, column in zip(sorted(contract), values[:, _HEAD:].T)
        if len(set(column)) > 1
    ]
    seeders = [i for i, seeder in enumerate(values[:, 1]) if seeder]
    if len(seeders) != 1:
        found.append(f"seeder: one client must be it, but clients {seeders} are")
    return found


def _differing(name: str, column: np.ndarray) -> str:
    others = (i for i, value in enumerate(column) if i == 0 or value != column[0])
    return f"{name}: " + ", ".join(f"client {i} has {int(column[i])}" for i in others)
