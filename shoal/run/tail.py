"""Reads files of a run while they are written: complete lines only, in bounded memory.

A writer appends whole lines, but a reader may see half of the last one. It is read when the rest is there. A
file that became shorter, or that another file has replaced, is read from its beginning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from shoal.limits import open_regular
from shoal.run.account import Account, Ledger
from shoal.run.directory import Run
from shoal.run.events import parse_events

_AT_ONCE = 4 << 20
"""Bytes that are read at once."""
_LONGEST_LINE = 1 << 20
"""Bytes of a line from which on its beginning is dropped."""


@final
class FileTail:
    """Read what was appended to a file since the last time.

    Args:
        path: The file; it may not be there yet.
        forget: Function that is called before the file is read from its beginning.
        at_once: Bytes to read at once.

    Attributes:
        position: Bytes of the file that were read, to the end of a line.
    """

    def __init__(
        self, path: Path, forget: Callable[[], None] = lambda: None, at_once: int = _AT_ONCE
    ) -> None:
        self._path = path
        self._forget = forget
        self._at_once = at_once
        self._identity: tuple[int, int] | None = None
        self.position = 0

    def size(self) -> int:
        """Return the bytes of the file, 0 without one; see whether it is still the same file."""
        identity, size = None, 0
        with contextlib.suppress(OSError):
            status = self._path.stat()
            identity, size = (status.st_dev, status.st_ino), status.st_size
        if identity != self._identity or size < self.position:
            self._identity, self.position = identity, 0
            self._forget()
        return size

    def chunks(self) -> Iterator[list[bytes]]:
        """Yield the lines that were completed since the last call, many at once."""
        if self.size() == self.position:
            return
        with contextlib.suppress(OSError), open_regular(self._path) as file:
            file.seek(self.position)
            rest = b""
            while chunk := file.read(self._at_once):
                *lines, rest = (rest + chunk).split(b"\n")
                self.position += sum(map(len, lines)) + len(lines)
                if len(rest) > _LONGEST_LINE:
                    self.position += len(rest)
                    rest = b""
                if lines:
                    yield lines


@final
class FollowedAccount:
    """Follow the events of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._files = [FileTail(run.events_file), FileTail(run.members_file)]
        self._ledger = Ledger()

    def look(self) -> Account | None:
        """Read what is new, and return the account; None for a run without events."""
        new = [line for file in self._files for lines in file.chunks() for line in lines]
        for event in parse_events(line.decode(errors="replace") for line in new):
            self._ledger.take(event)
        return self._ledger.account()
