"""Tables, paragraphs and JSON for the terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

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
