"""A prediction of a run beside its measurement, for the terminal."""

from __future__ import annotations

from typing import Any

from shoal.cli.breakdown import words
from shoal.cli.table import table_of
from shoal.timeline import Purpose

__all__ = ["compare_text"]


def compare_text(rows: list[dict[str, Any]]) -> str:
    """Return the result of `kinds_compared` as a table."""
    return table_of(
        ["predicted beside measured", "predicted", "measured", "error"],
        [
            [
                f"  {row['kind']}" if row["kind"] in tuple(Purpose) else words(row["kind"]),
                f"{row['predicted']:.6f}",
                f"{row['measured']:.6f}",
                "-" if row["error"] is None else f"{row['error']:+.1%}",
            ]
            for row in rows
        ],
    )
