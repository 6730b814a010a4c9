"""Reads files of a run while they are written: complete lines only, in bounded memory.

A writer appends whole lines, but a reader may see half of the last one. It is taken up when the rest is
there. A file that became shorter, or that another file has replaced, is read from its beginning.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import final

from shoal.limits import open_regular

__all__ = ["FollowedFile", "sampled_lines"]

_AT_ONCE = 1 << 22
"""Most bytes that are read at once. What is further back than that is passed over."""
_LONGEST_LINE = 1 << 20
"""Bytes of a line from which on it is given up."""


@final
class FollowedFile:
    """Read what was appended to a file since the last time.

    Args:
        path: The file; it may not be there yet.
        at_once: Most bytes to read at once.
    """

    def __init__(self, path: Path, at_once: int = _AT_ONCE) -> None:
        self._path = path
        self._at_once = at_once
        self._read = 0  # bytes of the file that were read, or passed over
        self._torn = b""
        self._identity: tuple[int, int] | None = None

    def lines(self) -> list[str]:
        """Return the lines that were completed since the last call; the newest, if there is too much."""
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                if (
                    self._identity != (identity := (status.st_dev, status.st_ino))
                    or status.st_size < self._read
                ):
                    self._identity, self._read, self._torn = identity, 0, b""
                is_passed_over = status.st_size - self._read > self._at_once
                if is_passed_over:
                    self._read, self._torn = status.st_size - self._at_once, b""
                file.seek(self._read)
                new = file.read(self._at_once)
        except OSError:
            return []
        self._read += len(new)
        whole, newline, rest = (self._torn + new).rpartition(b"\n")
        self._torn = rest if len(rest) <= _LONGEST_LINE else b""
        if not newline:
            return []
        found = whole.split(b"\n")
        # The first line is cut if the bytes before it were passed over.
        return [line.decode(errors="replace") for line in (found[1:] if is_passed_over else found)]


def sampled_lines(path: Path, count: int) -> Iterator[str]:
    """Yield some complete lines of a file, evenly spread over its bytes; all if there are few."""
    with contextlib.suppress(OSError), BufferedReader(open_regular(path)) as file:
        size = os.fstat(file.fileno()).st_size
        before = -1
        for number in range(count):
            file.seek(max(0, size * number // count - 1))
            if file.tell():
                file.readline(_LONGEST_LINE)  # what is left of the line before
            if (begin := file.tell()) == before:
                continue
            before = begin
            line = file.readline(_LONGEST_LINE)
            if line.endswith(b"\n"):
                yield line.decode(errors="replace")
