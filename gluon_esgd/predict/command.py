"""The command ``gluon-esgd plan``: what a configuration takes, or which one to take."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any, Dict, List, Sequence

from .configuration import STOCK, Configuration
from .prediction import predict
from .recommendation import Choice, recommend
from .report import text
from .request import Request, add_arguments, request_from

__all__ = ["add_command"]

_ABOUT = """\
Predict step time, epoch time and the busiest link of a configuration, or, without --clients or
--interval, compare those that the cluster allows and recommend one. Nothing is started or measured.
"""


def add_command(commands: Any) -> None:
    """Add ``plan`` to the subcommands of ``gluon-esgd``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan", help="predict step times", description=_ABOUT, allow_abbrev=False
    )
    add_arguments(parser)
    parser.set_defaults(go=_go)


def _go(options: argparse.Namespace) -> int:
    try:
        request = request_from(options)
    except ValueError as error:
        print(f"gluon-esgd plan: {error}", file=sys.stderr)
        return 2
    choices = _choices(request)
    if options.json:
        print(json.dumps(_document(request, choices), indent=2))
    else:
        print(text(request.work, request.cluster, request.name, choices, request.is_calibrated))
    return 0


def _choices(request: Request) -> List[Choice]:
    """Return the one configuration that was given, or those to choose from."""
    rule, clients, interval = request.rule, request.clients, request.interval
    is_one = clients is not None and (interval is not None or rule == "sgd")
    if rule in STOCK or is_one:
        one = Configuration(
            rule, request.workers, clients, request.servers, interval, **request.more
        )
        return [Choice(one, predict(request.work, request.cluster, one), True)]
    return recommend(
        request.work,
        request.cluster,
        rule,
        request.workers,
        request.servers,
        [] if clients is None else [clients],
        [] if interval is None else [interval],
        **request.more,
    )


def _document(request: Request, choices: Sequence[Choice]) -> Dict[str, Any]:
    return {
        "what": "a prediction, not a measurement",
        "calibrated": request.is_calibrated,
        "model": request.name,
        "work": asdict(request.work),
        "cluster": asdict(request.cluster),
        "choices": [
            {
                "configuration": asdict(choice.configuration),
                "is_best": choice.is_best,
                **choice.prediction.as_dict(),
            }
            for choice in choices
        ],
    }
