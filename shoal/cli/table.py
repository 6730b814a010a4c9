"""Tables, paragraphs and JSON for the terminal."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.analyze.foreign import is_foreign, read_foreign
from shoal.errors import UserError
from shoal.predict.simulate import mark_bubbles, measured_timeline
from shoal.spec.run import Run
from shoal.spec.timeline import Timeline
from shoal.units import finite

_COLUMNS = 100  # for text


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with columns two blanks apart: the first aligned left, the others right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def labelled(rows: Sequence[tuple[str, str]], *, indent: str = "") -> str:
    """Return a line for each pair of a label and a value, with the values below each other."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{indent}{label:<{width}}  {value}" for label, value in rows)


def paragraph(text: str, *, indent: str = "  ") -> str:
    """Wrap sentences into lines of readable width; indent the lines after the first."""
    return textwrap.fill(
        text, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def as_json(value: Any) -> str:
    """Return what a command prints with --json."""
    return json.dumps(finite(value), indent=2)


def timeline_at(path: Path) -> Timeline:
    """Return the measured timeline of a Run, of a folder of traces or of a table, with bubbles marked.

    Raises:
        RunError: The path is none of these, or a file cannot be read.
        ShoalError: A file of the Run is malformed.
    """
    if is_foreign(path):
        return mark_bubbles(read_foreign(path, lambda text: print(f"shoal: {text}", file=sys.stderr)))
    return measured_timeline(Run.open(path))


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
