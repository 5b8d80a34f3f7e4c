"""The command line of ``gluon-esgd run`` and its reading into a `JobSpec`."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Dict, Optional, Sequence, Tuple

from ..errors import LaunchError
from ..flags import FlagReader
from .hosts import Host, parse_hosts, read_hostfile
from .run import run
from .spec import JobSpec

__all__ = ["add_arguments", "add_command", "main", "spec_from"]

EXAMPLES = """\
examples:
  two clients of two ranks each, one server, elastic averaging every 16 steps:
    gluon-esgd run -n 4 --clients 2 --rule esgd --interval 16 python train.py --lr 0.1
  one client of eight ranks on two machines, pure MPI:
    gluon-esgd run -n 8 --hosts alpha:4,beta:4 python train.py
  four clients in one MPI job, no server:
    gluon-esgd run -n 8 --clients 4 --servers 0 python train.py
"""

_PARSER: Dict[str, Any] = {
    "description": "Start scheduler, servers and clients of a job, and end them all.",
    "epilog": EXAMPLES,
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "allow_abbrev": False,
}

# flag, placeholder, help. Values stay text here: all that is wrong is told at once.
_FLAGS = (
    ("-n", "N", "ranks of all clients together (default: all slots of the hosts)"),
    ("--clients", "C", "number of clients, must divide N (default: 1)"),
    ("--servers", "S", "parameter servers (default: 1 with several clients, else 0); 0: MPI only"),
    ("--rule", "RULE", "between clients: sgd, asgd or esgd"),
    ("--interval", "STEPS", "optimizer steps between two exchanges"),
    ("--alpha", "A", "moving rate, at most 2/(1+C)"),
    ("--beta", "B", "instead of alpha, which is then B/max(2, C)"),
    ("--lazy", "STEPS", "steps from a snapshot to the application of its exchange"),
    ("--compression", "fp16", "16-bit floats between machines and to the servers"),
    ("--hosts", "A:4,B:4", "machines and their slots, filled in order"),
    ("--hostfile", "FILE", "the same from a file, one 'NAME slots=4' a line"),
    ("--remote-shell", "CMD", "what runs a command on another host (default: ssh)"),
    ("--job-dir", "DIR", "logs and state (default: .esgd/<time>-<pid>); all hosts must see it"),
    ("--resume", "DIR", "instead: the folder of an earlier job, whose checkpoints it goes on from"),
    (
        "--max-restarts",
        "N",
        "how often a failed client is started again (default: 3 with servers"
        " and rule esgd or asgd; else the whole job, if given)",
    ),
    ("--min-clients", "M", "go on with M clients when one is not started again (default: all)"),
    ("--center-snapshot", "SECONDS", "how often the center is written to disk (default: 60)"),
    ("--grace", "SECONDS", "from SIGTERM to the end of ranks, to save in (default: 30)"),
    ("--start-timeout", "SECONDS", "limit for all ranks to have started (default: 120)"),
    ("--port", "PORT", "port of the first scheduler, the next take the next (default: free ones)"),
    ("--bind", "cores|none", "cores and thread caps of their own for ranks (default: cores)"),
    ("--mpiexec", "PATH", "MPICH's or Open MPI's (default: beside python, then on PATH)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of ``run`` and the command that follows them."""
    for flag, placeholder, text in _FLAGS:
        parser.add_argument(flag, metavar=placeholder, help=text)
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for the workers, or pass this one on to other hosts; repeatable",
    )
    parser.add_argument("--dry-run", action="store_true", help="print all commands, run nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each worker runs")


def spec_from(options: argparse.Namespace) -> JobSpec:
    """Return the job that parsed options describe.

    Raises
    ------
    ValueError
        Lists every fault, of reading and of meaning.
    """
    reader = FlagReader(vars(options))
    hosts = _hosts(reader, options)
    slots = sum(host.slots for host in hosts)
    workers = reader.get("n", int, "an integer", slots or 1)
    if options.n is None and not hosts:
        reader.faults.append("-n is missing: give the number of ranks of all clients together")
    whole = {name: reader.get(name, int, "an integer") for name in ("servers", "interval", "lazy")}
    real = {name: reader.get(name, float, "a number") for name in ("alpha", "beta")}
    return JobSpec(
        command=tuple(options.command[options.command[:1] == ["--"] :]),
        workers=workers,
        clients=reader.get("clients", int, "an integer", 1),
        hosts=hosts,
        env=tuple(_variable(text) for text in options.env),
        start_timeout_s=reader.get("start_timeout", float, "a number of seconds"),
        port=reader.get("port", int, "an integer"),
        max_restarts=reader.get("max_restarts", int, "an integer"),
        min_clients=reader.get("min_clients", int, "an integer"),
        center_snapshot_s=reader.get("center_snapshot", float, "a number of seconds"),
        grace_s=reader.get("grace", float, "a number of seconds", 30.0),
        job_dir=_job_dir(reader, options),
        resume=options.resume is not None,
        faults=reader.faults,
        **whole,
        **real,
        **_texts(options),
    )


def _texts(options: argparse.Namespace) -> Dict[str, Any]:
    given = {name: getattr(options, name) for name in ("rule", "compression", "mpiexec")}
    given["remote_shell"] = options.remote_shell or "ssh"
    given["bind"] = options.bind or "cores"
    return {**given, "dry_run": options.dry_run}


def _job_dir(reader: FlagReader, options: argparse.Namespace) -> Optional[str]:
    if options.job_dir is not None and options.resume is not None:
        reader.faults.append("--job-dir and --resume: give one of them")
    return options.job_dir if options.resume is None else options.resume


def _hosts(reader: FlagReader, options: argparse.Namespace) -> Tuple[Host, ...]:
    if options.hosts is not None and options.hostfile is not None:
        reader.faults.append("--hosts and --hostfile: give one of them")
    listed: Tuple[Host, ...] = reader.get("hosts", parse_hosts, "", ())
    return listed or reader.get("hostfile", read_hostfile, "", ())


def _variable(text: str) -> Tuple[str, Optional[str]]:
    name, equals, value = text.partition("=")
    return name, value if equals else None


def add_command(commands: Any) -> None:
    """Add ``run`` to the subcommands of ``gluon-esgd``."""
    _complete(commands.add_parser("run", help="start a job", **_PARSER))


def _complete(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_arguments(parser)
    parser.set_defaults(go=_go)
    return parser


def _go(options: argparse.Namespace) -> int:
    try:
        return run(spec_from(options))
    except (ValueError, LaunchError, OSError) as error:
        print(f"gluon-esgd run: {error}", file=sys.stderr)
        return 2


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run ``python -m gluon_esgd.launch``; return the exit code."""
    parser = _complete(argparse.ArgumentParser(prog="python -m gluon_esgd.launch", **_PARSER))
    return int(_go(parser.parse_args(argv)))
