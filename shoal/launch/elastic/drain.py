"""Requests to a run that goes on: a file in its directory, which its launcher reads.

Who may write to the run's directory may ask; nothing listens for it.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from shoal.limits import open_regular

_NAME = "requests.jsonl"
_LARGEST = 1 << 16  # bytes that are read at a time


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Attributes:
        number: What it is called in the answer.
        what: The rank or the host that is asked to leave.
    """

    number: str
    what: str


def ask_to_leave(run: Path, what: str) -> str:
    """Ask that a rank or a host leaves a run; return what the answer calls this request.

    Args:
        run: The run's directory.
        what: The rank's number, or the host's name or address.

    Raises:
        OSError: The directory cannot be written to.
    """
    number = secrets.token_hex(8)
    with (run / _NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "request": number, "leave": what}) + "\n")
    return number


@final
class Requests:
    """The requests to a run that were made since this object was.

    Args:
        run: The run's directory, which may not exist yet; None for no requests.
    """

    def __init__(self, run: Path | None) -> None:
        self._path = None if run is None else run / _NAME
        self._read = self._size()

    def take(self) -> list[Request]:
        """Return the requests since the last call."""
        if self._path is None or self._size() <= self._read:
            return []
        try:
            with open_regular(self._path) as file:
                file.seek(self._read)
                whole, newline, _ = file.read(_LARGEST).rpartition(b"\n")
        except OSError:
            return []
        self._read += len(whole) + len(newline)
        return [request for line in whole.splitlines() if (request := _read(line)) is not None]

    def _size(self) -> int:
        try:
            return 0 if self._path is None else self._path.stat().st_size
        except OSError:
            return 0


def _read(line: bytes) -> Request | None:
    """Return the request of a line; None for a line of something else."""
    try:
        told = json.loads(line)
        return Request(str(told["request"]), str(told["leave"]))
    except (ValueError, KeyError, TypeError):
        return None
