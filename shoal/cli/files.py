"""Writes files that options of a command name."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from shoal.errors import UserError


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


def write_new(what: str, path: Path, text: str, *, overwrite: bool) -> None:
    """Write a text file whole or not at all, in place of another only if that was asked for.

    Args:
        what: Word for its content, such as "description".
        path: Path of the file, which the option --out named.
        text: Content of the file.
        overwrite: Whether a file that is there is replaced.

    Raises:
        UserError: The file is there already, or cannot be written.
    """
    if path.is_dir() or (path.exists() and not overwrite):
        raise UserError(
            f"{path} exists already" + (", and is a directory" if path.is_dir() else ""),
            possible="a file that is not there yet, or --overwrite",
            change="give another FILE to --out",
        )
    write_file(what, path, "--out", lambda path: _replace(path, text))


def _replace(path: Path, text: str) -> None:
    """Write beside the file, and put the result in its place."""
    number, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
