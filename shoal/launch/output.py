"""What ranks print: passed on to the terminal, and kept in the `log/` of their run."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, cast, final

__all__ = ["RankLog", "keep_output", "pass_on"]

_OVERWRITE = b"\r\x1b[K"  # what begins a line of progress that is written over on a terminal


@final
class RankLog:
    """The file `rank-00000.log` of a rank. Runs that are resumed append to it.

    The directory is made by rank 0 when the run begins. Until then the output is held in memory, and it is
    dropped if there is no run in the end.

    Args:
        directory: The `log/` of a run; None to keep nothing.
        rank: The global rank.
        ranks: How many there are.
    """

    def __init__(self, directory: Path | None, rank: int, ranks: int) -> None:
        self._directory = directory
        self._path = Path() if directory is None else directory / f"rank-{rank:05d}.log"
        self._held = f"--- {datetime.now():%Y-%m-%d %H:%M:%S}, rank {rank} of {ranks}\n".encode()

    def close(self) -> None:
        """Leaves a file for a rank that printed nothing too."""
        self.write(b"")

    def write(self, data: bytes) -> None:
        """Keeps what the rank printed. A full disk loses the log, and does not stop the run."""
        if self._directory is None:
            return
        self._held += data
        # Only runs have such a directory, so that a look at it tells whether there is one yet.
        with contextlib.suppress(OSError):
            if self._directory.is_dir():
                with self._path.open("ab") as file:
                    file.write(self._held.replace(_OVERWRITE, b"\n"))
                self._held = b""


def pass_on(data: bytes, descriptor: int) -> None:
    """Writes to a file descriptor of this process. A reader that is gone gets nothing."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return


@contextlib.contextmanager
def keep_output(log: RankLog) -> Iterator[None]:
    """Within it, what this process prints through `sys.stdout` and `sys.stderr` is kept in the log too."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Kept(stream, log)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@final
class _Kept:
    """A text stream whose text goes to a log too."""

    def __init__(self, stream: TextIO, log: RankLog) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        """Writes to the log first: the terminal may be gone."""
        self._log.write(text.encode(errors="backslashreplace"))
        return self._stream.write(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Writes each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
