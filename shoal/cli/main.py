"""The program `shoal`: finds the command, and prints errors without a traceback."""

from __future__ import annotations

import argparse
import errno
import gc
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.cli.commands import COMMANDS, add_command
from shoal.errors import ShoalError, WorkerError
from shoal.limits import NotRegularError
from shoal.release import release
from shoal.signals import keep_exit_codes


class PrintVersion(argparse.Action):
    """Print the version, and whether the native core is built, and exit. Imports no torch."""

    def __init__(self, option_strings: Sequence[str], dest: str, **others: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and the core's")

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        """Print and exit, as argparse calls it."""
        print(f"shoal {release()}\n{_core()}")
        parser.exit()


def _core() -> str:
    import ctypes

    path = Path(__file__).parent.parent / "collectives" / "_core.so"
    if not path.exists():
        return "native core: not built; ranks on CPUs communicate through gloo"
    try:
        unit = ctypes.CDLL(str(path)).shoal_vector_unit
    except (OSError, AttributeError) as error:
        return f"native core: does not load: {error}"
    unit.restype = ctypes.c_char_p
    return f"native core: built, computes with {unit().decode()}"


_OF_THE_PLACE = frozenset(
    {errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
    | {errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EREMOTEIO}
)
"""Errors of the system that a path or its file system causes: a name that is too long, a disk that is full or
that failed, a mount whose server is gone."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Arguments of the command line; by default those of the process.

    Returns:
        The exit code: 0; 1 for a failure; 2 for something given that cannot work; others as the command's
        help says.
    """
    if arguments is None:
        keep_exit_codes()
        _open_standard_files()
    parser = argparse.ArgumentParser(
        prog="shoal",
        description="Trains one PyTorch model on many devices, and accounts for every millisecond.",
    )
    parser.add_argument("--version", action=PrintVersion)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    words = sys.argv[1:] if arguments is None else arguments
    first = next((word for word in words if not word.startswith("-")), "")
    gc.disable()  # a collection goes through all modules that are imported, and finds nothing
    for command in [first] if first in COMMANDS and first != "completion" else COMMANDS:
        add_command(commands, command, is_asked=first in (command, "completion"))
    gc.enable()
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
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"shoal: {error.filename} may not be read or written by this user", file=sys.stderr)
        return 2
    except NotRegularError as error:
        print(f"shoal: {error.filename} {error.strerror}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not any(map(_has_lost_reader, (1, 2))):
            raise
        sys.stderr.close()  # the reader of the output has read enough
        return 0
    except OSError as error:
        if error.filename is None or error.errno not in _OF_THE_PLACE:
            raise
        print(f"shoal: {error.filename!r:.300}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _open_standard_files() -> None:
    """Open those of stdin, stdout and stderr that this program was started without (`2>&-`), on nothing.

    Else a file of a run would get such a number, and what a library prints would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _has_lost_reader(descriptor: int) -> bool:
    """Return whether nobody reads any more what this process writes to a descriptor."""
    asked = select.poll()
    asked.register(descriptor, 0)
    return any(told & (select.POLLERR | select.POLLHUP) for _, told in asked.poll(0))


if __name__ == "__main__":
    sys.exit(main())
