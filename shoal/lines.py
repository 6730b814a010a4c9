"""The lines of a text file in bounded memory, however long a line is."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader, TextIOWrapper
from pathlib import Path

from shoal.limits import open_regular

__all__ = ["LONGEST_LINE", "bounded_lines"]

LONGEST_LINE = 1 << 20
"""Characters of a line from which on it is cut: no file of a run has such a line."""


def bounded_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[str]:
    """Yield the lines of a file; of a line that is too long only the beginning, without what follows.

    So a longer line ends torn, and no reader takes it for a whole one.

    Raises:
        OSError: The file cannot be read, or is no regular one.
    """
    with TextIOWrapper(BufferedReader(open_regular(path)), encoding="utf-8-sig", errors="replace") as file:
        while line := file.readline(longest):
            yield line
            if len(line) == longest and not line.endswith("\n"):
                while (rest := file.readline(longest)) and not rest.endswith("\n"):
                    pass
