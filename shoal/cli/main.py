"""The program `shoal`: finds the command, and prints errors without a traceback."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shoal.cli import (
    aggregate,
    bench,
    calibrate,
    check,
    checkpoint,
    cluster,
    completion,
    plan,
    probe,
    report,
    sample,
    scale,
    schedule,
    simulate,
    train,
    validate,
)
from shoal.cli.version import PrintVersion
from shoal.errors import ShoalError, WorkerError

__all__ = ["main"]

_COMMANDS = (
    train,
    sample,
    report,
    check,
    schedule,
    plan,
    scale,
    simulate,
    checkpoint,
    bench,
    aggregate,
    cluster,
    probe,
    calibrate,
    validate,
    completion,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Arguments of the command line; by default those of the process.

    Returns:
        The exit code: 0; 1 for a failure; 2 for something given that cannot work; others as the command's
        help says.
    """
    parser = argparse.ArgumentParser(
        prog="shoal",
        description="Trains one PyTorch model on many devices, and accounts for every millisecond.",
    )
    parser.add_argument("--version", action=PrintVersion)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    parser.set_defaults(program=parser)  # one command prints a script for the parser
    parsed = parser.parse_args(arguments)
    parsed.is_program = arguments is None  # else the caller may have threads
    # torch, imported later, warns of name services that it does not need and of stores that close.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        code: int = parsed.run(parsed)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        if isinstance(error, WorkerError) and error.detail:
            print(f"\n{error.detail}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of the output has read enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
