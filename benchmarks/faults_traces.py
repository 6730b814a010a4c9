"""What a training of `faults.py` leaves: lines that it wrote, and processes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file, without lines that are torn; none if there is no file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def failures(told: str) -> str:
    """Return what Shoal tells of failures."""
    return "; ".join(line for line in told.splitlines() if line.startswith(("shoal:", "warning")))[:400]


def is_in(process: Path, folder: Path) -> bool:
    """Return whether a process works in a folder."""
    try:
        return (process / "cwd").readlink() == folder
    except OSError:
        return False


def is_rank(process: Path) -> bool:
    """Return whether a process is a rank that has not ended."""
    try:
        return (process / "comm").read_text().startswith("shoal-rank")
    except OSError:
        return False


def namespace_of(process: Path) -> Path | None:
    """Return the network namespace of a process; None if it has ended."""
    try:
        return (process / "ns" / "net").readlink()
    except OSError:
        return None
