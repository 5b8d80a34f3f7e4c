"""The command ``gluon-esgd data``: RecordIO from class folders, and a look at RecordIO."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, List

if TYPE_CHECKING:
    from .data import PackedFolder

__all__ = ["add_command"]

_INTERRUPTED = 130

_ABOUT = """\
Write pictures into RecordIO files that mx.io.ImageRecordIter and gluon_esgd.data.record_shard read.

FOLDER holds train/ and perhaps val/ of class folders, as ImageNet does, or class folders. DIR gets
train.rec, train.idx, val.rec and val.idx where there are pictures to validate with, and
classes.txt, the class of each label from 0 on. Every picture is decoded once. Records come in an
order drawn by the seed. After an interruption, or a kill, the same command goes on where it was.
"""

_EXAMPLES = """\
examples:
  ImageNet as it is:
    gluon-esgd data /data/ILSVRC2012 --to /data/imagenet
  the shorter side 256, several times smaller:
    gluon-esgd data /data/ILSVRC2012 --to /data/imagenet-256 --resize 256
  class folders, one picture in ten to validate with:
    gluon-esgd data flowers --to flowers-rec --validation 0.1
  are these files sound?
    gluon-esgd data /data/imagenet --check
"""

# flag, placeholder, type, help
_FLAGS: Any = (
    ("--to", "DIR", str, "for the files; is made where it is missing"),
    (
        "--resize",
        "N",
        int,
        "make the shorter side N pixels, as JPEG in RGB, upright, over white where it is "
        "transparent; what is smaller is not enlarged (default: files go in as they are)",
    ),
    ("--quality", "Q", int, "of these JPEG, from 1 to 100 (default: 95)"),
    ("--workers", "N", int, "processes (default: the cores that this one may use)"),
    ("--seed", "S", int, "of the order, and of the choice for --validation (default: 0)"),
    (
        "--validation",
        "SHARE",
        float,
        "of each class for val.rec, as 0.1, where there is no val/; one picture at least stays",
    ),
)


def add_command(commands: Any) -> None:
    """Add ``data`` to the subcommands of ``gluon-esgd``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "data",
        help="make RecordIO from folders of pictures",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="with pictures; or .rec, with --check")
    for flag, placeholder, kind, text in _FLAGS:
        parser.add_argument(flag, metavar=placeholder, type=kind, help=text)
    parser.add_argument(
        "--skip-broken", action="store_true", help="leave them out, list them in DIR/left-out.txt"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="make nothing: decode all records of the .rec files in FOLDER, name what is broken",
    )
    parser.set_defaults(go=_go)


def _go(options: argparse.Namespace) -> int:
    given = {flag[2:]: getattr(options, flag[2:]) for flag, *_ in _FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        if options.check:
            return _check(options.folder, [*given, *["skip-broken"] * options.skip_broken])
        if "to" not in given:
            raise ValueError("--to is missing: name the folder for the files")
        return _pack(options.folder, {**given, "skip_broken": options.skip_broken})
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        print(f"gluon-esgd data: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = "" if options.check else "; the same command goes on from here"
        print(f"gluon-esgd data: interrupted{goes_on}", file=sys.stderr)
        return _INTERRUPTED


def _pack(folder: str, arguments: Any) -> int:
    # Here, since gluon-esgd must start where numpy is missing, to say so.
    from .data import BrokenPicturesError, pack_folder

    try:
        with _heard():
            packed = pack_folder(folder, **arguments)
    except BrokenPicturesError as error:
        print(f"gluon-esgd data: {error.told('--skip-broken')}", file=sys.stderr)
        return 1
    print(_told(packed))
    return 0


@contextmanager
def _heard() -> Iterator[None]:
    """Show what the library logs."""
    logger, handler = logging.getLogger("gluon_esgd.data"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("gluon-esgd data: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _told(packed: PackedFolder) -> str:
    """Return what was made, and how to train with it."""
    rows = [
        (f"{name}.rec", f"{packed.records[name]:,} records, {packed.bytes[name]:,} bytes")
        for name in sorted(packed.records)
    ]
    if "val" not in packed.records:
        rows.append(("val.rec", "none, but the recipe wants one: --validation 0.1 makes it"))
    rows.append(("classes", f"{packed.classes:,} (classes.txt)"))
    if packed.left_out:
        rows.append(("left out", f"{len(packed.left_out):,} broken pictures (left-out.txt)"))
    if packed.ignored:
        files = f"{len(packed.ignored):,} files that are no pictures of a class"
        rows.append(("ignored", f"{files}, as {packed.ignored[0]!r}"))
    if packed.pictures:
        pace = f"{packed.pictures / packed.seconds:,.0f} pictures/s"
        rows.append(("time", f"{packed.seconds:,.1f} s for {packed.pictures:,} pictures, {pace}"))
    run = "gluon-esgd run -n 4 --clients 2 --rule esgd python recipes/resnet50_imagenet.py"
    rows.append(("to train", f"{run} --data {shlex.quote(packed.folder)}"))
    return "\n".join(f"{name:<12}{value}" for name, value in rows)


def _check(folder: str, given: List[str]) -> int:
    if given:
        flags = ", ".join(f"--{name}" for name in given)
        raise ValueError(f"--check looks at the .rec files of FOLDER: leave out {flags}")
    paths = sorted(Path(folder).glob("*.rec"))
    if not paths:
        raise ValueError(f"there is no .rec file in {folder}")
    # MXNet decodes JPEG in threads of its engine: one, unless told before it is loaded.
    os.environ.setdefault("MXNET_CPU_WORKER_NTHREADS", str(len(os.sched_getaffinity(0))))
    from .data import check_records

    code = 0
    for path in paths:
        try:
            print(f"{path}: {check_records(path, decode=True):,} records, all sound", flush=True)
        except ValueError as error:
            print(f"gluon-esgd data: {error}", file=sys.stderr)
            code = 1
    return code
