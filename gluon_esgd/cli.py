"""The command ``gluon-esgd``."""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from . import data_command
from .launch import arguments, doctor, status
from .predict import command as predict_command
from .tune import command

__all__ = ["main"]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run ``gluon-esgd``; return the exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process unless given.
    """
    parser = argparse.ArgumentParser(
        prog="gluon-esgd", description="Elastic Averaging SGD for MXNet Gluon.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    arguments.add_command(commands)
    status.add_commands(commands)
    doctor.add_command(commands)
    command.add_command(commands)
    data_command.add_command(commands)
    predict_command.add_command(commands)
    options = parser.parse_args(argv)
    return int(options.go(options))


if __name__ == "__main__":
    sys.exit(main())
