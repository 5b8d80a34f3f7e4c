"""``python -m gluon_esgd.tune``: measures the job it is started in; rank 0 writes the table."""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from ..topology import World, world
from .measure import measure
from .request import Request, add_arguments, request_from
from .results import check_place, describe, merge, text, told, write

__all__ = ["main"]

_ABOUT = "Measure the collectives of this job and write the table that `auto` follows."


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run on every rank; return the exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process unless given.
    """
    parser = argparse.ArgumentParser(
        prog="python -m gluon_esgd.tune", description=_ABOUT, allow_abbrev=False
    )
    add_arguments(parser)
    # What was measured goes there and not to standard output: gluon-esgd tune reads it.
    parser.add_argument("--record", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.output = options.record or options.output
    here = world()
    request = _request(options, here)
    if request is None:
        return 2
    say = _say if here.is_main else _hush
    try:
        samples = measure(here.comm, request.sizes, request.limit_s, say)
    except KeyboardInterrupt:
        return 130
    if not here.is_main:
        return 0
    document = describe(samples, here.comm, _mpi_version())
    try:
        write(request.output, merge(request.output, document))
    except OSError as error:
        _say(str(error))
        return 1
    if options.record is None:
        print(text(document), flush=True)
        _say(told(request.output))
    return 0


def _request(options: argparse.Namespace, here: World) -> Optional[Request]:
    """What is to be measured; None on all ranks where it cannot be, and rank 0 says why."""
    request, fault = None, None
    try:
        request = request_from(options)
        if here.is_main:
            check_place(request.output)
    except (ValueError, OSError) as error:
        fault = str(error)
    if here.size == 1:
        fault = "there is one rank only; start several with mpiexec, or use gluon-esgd tune"
    fault = next((f for f in here.allgather(fault) if f is not None), None)
    if fault is None:
        return request
    if here.is_leader:
        _say(fault)
    return None


def _say(line: str) -> None:
    print(f"gluon-esgd tune: {line}", file=sys.stderr, flush=True)


def _hush(line: str) -> None:
    pass


def _mpi_version() -> str:
    from mpi4py import MPI

    first = MPI.Get_library_version().splitlines()[0].partition(",")[0]
    return " ".join(first.replace("Version:", " ").split()).strip("\0 ")


if __name__ == "__main__":
    sys.exit(main())
