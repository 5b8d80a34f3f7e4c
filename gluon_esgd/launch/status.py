"""``gluon-esgd status``, ``add-client``, ``remove-client``: a running job, seen and changed."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Callable, Dict, Optional, Sequence

from ..errors import LaunchError
from .control import ask
from .generations import Generations
from .lives import Place

__all__ = ["add_commands", "describe", "table"]

Message = Dict[str, Any]

_COLUMNS = ("client", "state", "pid", "life", "step", "exchanges", "lost", "staleness_s")


def describe(places: Sequence[Place], generations: Optional[Generations]) -> Message:
    """Return what is known of a job's clients and, where there are servers, of its center."""
    clients = [_client(place, k, generations) for place in places for k in place.numbers]
    told: Message = {"generation": None, "handover": None, "servers": {}, "clients": clients}
    if generations is not None:
        handover = generations.handover
        told.update(
            generation=generations.running,
            handover=None if handover is None else f"{handover.phase}: {handover.why}",
            servers=dict(generations.roles),
        )
    return told


def _client(place: Place, client: int, generations: Optional[Generations]) -> Message:
    told: Message = dict.fromkeys(_COLUMNS)
    ended = place.state in ("restarting", "finished", "empty")
    told.update(client=client, state=place.state, life=place.life)
    told["pid"] = None if ended else place.child.pid
    member = None if generations is None else generations.members.get(client)
    if member is not None:
        told.update(member.progress)
        if member.connected:
            told["pid"] = member.pid
    return told


def table(told: Message) -> str:
    """Return what `describe` told, for people."""
    rows = [_COLUMNS, *([_cell(row[name]) for name in _COLUMNS] for row in told["clients"])]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows]
    if told["generation"] is not None:
        servers = ", ".join(f"{name} (pid {pid})" for name, pid in told["servers"].items())
        lines.append(f"generation {told['generation']}: {servers or 'not up yet'}")
    if told["handover"]:
        lines.append(f"hand-over, {told['handover']}")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def add_commands(commands: Any) -> None:
    """Add ``status``, ``add-client`` and ``remove-client`` to those of ``gluon-esgd``."""
    status = _command(commands, "status", "show clients and center of a running job", _status)
    status.add_argument("--json", action="store_true", help="as JSON, for programs")
    add = _command(commands, "add-client", "add a client to a running job", _add_client)
    add.add_argument(
        "--host", metavar="NAME", help="one of the job's hosts (default: that with fewest ranks)"
    )
    remove = _command(commands, "remove-client", "end a client; the others go on", _remove_client)
    remove.add_argument("client", metavar="K", type=int, help="its number")


def _command(
    commands: Any, name: str, text: str, go: Callable[[argparse.Namespace], Optional[str]]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text.capitalize() + ".", allow_abbrev=False
    )
    parser.add_argument("job_dir", metavar="DIR", help="the job's folder")
    parser.set_defaults(go=lambda options: _tell(name, go, options))
    return parser


def _tell(
    name: str, go: Callable[[argparse.Namespace], Optional[str]], options: argparse.Namespace
) -> int:
    try:
        print(go(options))
    except LaunchError as error:
        print(f"gluon-esgd {name}: {error}", file=sys.stderr)
        return 2
    return 0


def _status(options: argparse.Namespace) -> str:
    told = ask(options.job_dir, {"do": "status"})
    return json.dumps(told) if options.json else table(told)


def _add_client(options: argparse.Namespace) -> str:
    return str(ask(options.job_dir, {"do": "add-client", "host": options.host})["said"])


def _remove_client(options: argparse.Namespace) -> str:
    return str(ask(options.job_dir, {"do": "remove-client", "client": options.client})["said"])
