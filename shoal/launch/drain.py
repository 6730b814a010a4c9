"""Requests to a run that goes on: a file in its directory, which its launcher reads.

Who may write to the run's directory may ask; nothing listens for it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import final

__all__ = ["Requests", "ask_to_leave"]

_NAME = "requests.jsonl"
_LARGEST = 1 << 16  # bytes that are read at a time


def ask_to_leave(run: Path, what: str) -> None:
    """Ask that a rank or a host leaves a run.

    Args:
        run: The run's directory.
        what: The rank's number, or the host's name or address.

    Raises:
        OSError: The directory cannot be written to.
    """
    with (run / _NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "leave": what}) + "\n")


@final
class Requests:
    """The requests to a run that were made since this object was.

    Args:
        run: The run's directory, which may not exist yet; None for no requests.
    """

    def __init__(self, run: Path | None) -> None:
        self._path = None if run is None else run / _NAME
        self._read = self._size()

    def take(self) -> list[str]:
        """Return which ranks and hosts were asked to leave since the last call."""
        if self._path is None or self._size() <= self._read:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read(_LARGEST).rpartition(b"\n")
        except OSError:
            return []
        self._read += len(whole) + len(newline)
        return [what for line in whole.splitlines() if (what := _asked(line))]

    def _size(self) -> int:
        try:
            return 0 if self._path is None else self._path.stat().st_size
        except OSError:
            return 0


def _asked(line: bytes) -> str:
    """Return who is asked to leave; "" for a line of something else."""
    try:
        told = json.loads(line)
    except ValueError:
        return ""
    return str(told.get("leave", "")) if isinstance(told, dict) else ""
