"""Class folders as all ranks of a client see them, or an error that says where they do not."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from ..data.folders import Listing, Pictures, list_folder, listed, shown
from ..topology import World
from .together import raise_on_all

__all__ = ["list_alike"]

_WHAT = "the listing of class folders"
_Files = Dict[str, int]  # bytes by name


def list_alike(folder: str, me: World) -> Listing:
    """List `folder` on each rank, and see that all have found the same; collective in the client.

    The same are names and sizes, not times, so each machine may have a copy of its own.

    Raises
    ------
    OSError, ValueError
        On all ranks of the client: a rank finds no such folders, a class without pictures, empty
        files, or other pictures than rank 0.
    """
    listing: Optional[Listing] = None
    failure: Optional[Exception] = None
    try:
        listing = list_folder(folder)
        _refuse_empty(folder, listing)
    except (OSError, ValueError) as error:
        failure = error
    raise_on_all(me, failure, _WHAT)
    assert listing is not None
    _compare(folder, listing, me)
    return listing


def _refuse_empty(folder: str, listing: Listing) -> None:
    faults: List[Tuple[str, str]] = []
    for pictures in _sets(listing).values():
        for k in np.flatnonzero(pictures.sizes < 1):
            why = "is empty" if pictures.sizes[k] == 0 else "cannot be looked at"
            faults.append((os.path.join(pictures.root, pictures.paths[k]), why))
    if faults:
        raise ValueError(
            f"{len(faults)} broken picture(s) in {shown(folder)}: mend or remove them, or leave "
            f"them out with gluon-esgd data --skip-broken:{listed(faults)}"
        )


def _compare(folder: str, listing: Listing, me: World) -> None:
    """Raise on all ranks if one of them has another listing than rank 0."""
    digests = _digests(listing)
    totals = me.allgather(_sha(sorted(digests.items())), _WHAT)
    other = next((rank for rank, total in enumerate(totals) if total != totals[0]), None)
    if other is None:
        return
    counts = {name: len(pictures.paths) for name, pictures in _sets(listing).items()}
    seen = me.allgather([len(listing.classes), counts, digests], _WHAT)
    (classes, pictures, ours), (other_classes, other_pictures, theirs) = seen[0], seen[other]
    differ = min(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
    files = me.allgather(_files(listing, differ), _WHAT)
    raise ValueError(
        f"ranks see different pictures in {shown(folder)}: rank 0 {_counted(classes, pictures)}, "
        f"rank {other} {_counted(other_classes, other_pictures)}; first, "
        f"{_difference(differ, files[0], files[other], other)}. Give all ranks the same files"
    )


def _sets(listing: Listing) -> Dict[str, Pictures]:
    return {"train": listing.train, **({"val": listing.val} if listing.val else {})}


def _digests(listing: Listing) -> Dict[str, str]:
    """Return a digest of names and sizes for each class folder, by its path."""
    return {
        f"{name}/{label}": _sha(list(zip(pictures.paths[mine], pictures.sizes[mine].tolist())))
        for name, pictures in _sets(listing).items()
        for label, mine in _classes(listing, pictures).items()
    }


def _classes(listing: Listing, pictures: Pictures) -> Dict[str, slice]:
    ends = np.cumsum(np.bincount(pictures.labels, minlength=len(listing.classes))).tolist()
    return {k: slice(*at) for k, *at in zip(listing.classes, [0, *ends], ends)}


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _files(listing: Listing, folder: str) -> Optional[_Files]:
    """Return what a class folder holds; None where there is none."""
    name, _, label = folder.partition("/")
    pictures = _sets(listing).get(name)
    if pictures is None or label not in listing.classes:
        return None
    mine = _classes(listing, pictures)[label]
    return dict(zip(pictures.paths[mine], pictures.sizes[mine].tolist()))


def _counted(classes: int, pictures: Dict[str, int]) -> str:
    counts = " and ".join(f"{count:,} in {name}" for name, count in pictures.items())
    return f"has {classes:,} classes, {counts}"


def _difference(folder: str, ours: Optional[_Files], theirs: Optional[_Files], other: int) -> str:
    if ours is None or theirs is None:
        return f"there is no {shown(folder)} on rank {other if theirs is None else 0}"
    name = min(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
    seen = ", ".join(
        f"{files[name]:,} bytes on rank {rank}" if name in files else f"not there on rank {rank}"
        for rank, files in ((0, ours), (other, theirs))
    )
    return f"{shown(folder.split('/')[0])}/{shown(name)}: {seen}"
