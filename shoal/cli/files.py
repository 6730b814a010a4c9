"""Writes files that options of a command name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from shoal.errors import UserError

__all__ = ["write_file", "write_text"]


def write_file(what: str, path: Path, option: str, write: Callable[[Path], object]) -> None:
    """Write a file, and say on stderr where it is.

    Args:
        what: Word for its content, such as "picture".
        path: Path of the file.
        option: The option that named it, such as "--svg".
        write: Function that writes to the path.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        write(path)
    except OSError as error:
        raise UserError(
            f"the {what} cannot be written to {path}: {error.strerror}",
            possible="a file in a directory that can be written to",
            change=f"give another FILE to {option}",
        ) from error
    print(f"{what} written to {path}", file=sys.stderr)


def write_text(what: str, path: Path, option: str, text: str) -> None:
    """Write a text file like `write_file`.

    Raises:
        UserError: The file cannot be written.
    """
    write_file(what, path, option, lambda path: path.write_text(text, encoding="utf-8"))
