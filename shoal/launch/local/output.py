"""Passes the output of ranks on to the terminal, and keeps it in the `log/` of their run.

Lines of a host's ranks on their way to the host that leads, whose stream shows those of all hosts.

A rank may print without end, and the stream may take lines slowly. So each rank has a buffer of `_MOST` bytes
here, and one batch is on its way at a time: the next one follows when the host that leads has shown the last.
Lines that find no room are dropped and counted. Neither the rank nor the launchers wait, and the rank's log
has all lines.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections import Counter, deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO, cast, final

_LONGEST = 1 << 20  # bytes of a line
_OVERWRITE = b"\r\x1b[K"  # beginning of a line of progress that a terminal overwrites


@final
class RankLog:
    """The file `rank-00000.log` of a rank. Runs that are resumed append to it.

    Rank 0 makes the directory when the run begins. Until then the output stays in memory; it is dropped if no
    run begins.

    Args:
        directory: The `log/` of a run; None to keep nothing.
        rank: The global rank.
        ranks: Number of ranks.

    Attributes:
        rank: The global rank.
    """

    def __init__(self, directory: Path | None, rank: int, ranks: int) -> None:
        self.rank = rank
        self._directory = directory
        self._path = Path() if directory is None else directory / f"rank-{rank:05d}.log"
        self._held = f"--- {datetime.now():%Y-%m-%d %H:%M:%S}, rank {rank} of {ranks}\n".encode()

    def close(self) -> None:
        """Write the log's file, also for a rank that printed nothing."""
        self.write(b"")

    def write(self, data: bytes) -> None:
        """Keep output of the rank. A full disk loses the log, but does not stop the run."""
        if self._directory is None:
            return
        self._held += data
        # Only runs have such a directory, so its existence shows whether there is a run yet.
        with contextlib.suppress(OSError):
            if self._directory.is_dir():
                with self._path.open("ab") as file:
                    file.write(self._held.replace(_OVERWRITE, b"\n"))
                self._held = b""


@final
class NamedLines:
    """The output of a rank as it goes into the stream of all ranks.

    Each line is passed on whole, with the rank's number before it, so that lines of different ranks never
    mix. Rank 0 speaks for the run: its lines have no number, and a terminal gets them as they come, since
    some overwrite themselves. With several hosts rank 0 is as the others, and the host stands before the
    number.

    Args:
        rank: The global rank; None for what the host itself says.
        overwrites: Whether the stream is a terminal, on which rank 0 may have an unfinished line.
        host: The host's name where there are several; empty if there is one.
    """

    def __init__(self, rank: int | None, *, overwrites: bool, host: str = "") -> None:
        name = f"[{host}] " if rank is None else f"[{host} rank {rank}] " if host else f"[rank {rank}] "
        is_alone = rank == 0 and not host
        self._is_passed = is_alone and overwrites
        self._before = b"" if is_alone else (_OVERWRITE if overwrites else b"") + name.encode()
        self._torn = b""

    def take(self, data: bytes) -> bytes:
        """Return what is to be passed on, now that the rank has written this."""
        if self._is_passed:
            return data
        whole, newline, rest = (self._torn + data).rpartition(b"\n")
        if len(rest) > _LONGEST:  # without an end: pass on what is there
            whole, newline, rest = whole + newline + rest, b"\n", b""
        self._torn = rest
        return b"".join(self._before + line + b"\n" for line in whole.split(b"\n")) if newline else b""

    def end(self) -> bytes:
        """Return the rest of the output, now that the rank writes no more."""
        return self.take(b"\n") if self._torn else b""


class Output(Protocol):
    """Takes what ranks write."""

    def add(self, rank: int, descriptor: int, data: bytes) -> None:
        """Take what a rank has written to a file descriptor."""

    def end(self, rank: int, descriptor: int) -> None:
        """Take note that a rank writes no more to a file descriptor."""


@final
class Terminal:
    """Passes what ranks write on to the streams of this process.

    Args:
        host: The host's name where there are several; empty if there is one.
    """

    def __init__(self, host: str = "") -> None:
        self._host = host
        self._lines: dict[tuple[int, int], NamedLines] = {}

    def add(self, rank: int, descriptor: int, data: bytes) -> None:
        """Take what a rank has written to a file descriptor."""
        if (rank, descriptor) not in self._lines:
            lines = NamedLines(rank, overwrites=os.isatty(descriptor), host=self._host)
            self._lines[rank, descriptor] = lines
        pass_on(self._lines[rank, descriptor].take(data), descriptor)

    def end(self, rank: int, descriptor: int) -> None:
        """Take note that a rank writes no more to a file descriptor."""
        if (lines := self._lines.pop((rank, descriptor), None)) is not None:
            pass_on(lines.end(), descriptor)


def pass_on(data: bytes, descriptor: int) -> None:
    """Write to a file descriptor of this process. If the reader is gone, do nothing."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return


@contextlib.contextmanager
def keep_output(log: RankLog) -> Iterator[None]:
    """Within this context, also keep the output to `sys.stdout` and `sys.stderr` in the log."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Kept(stream, log)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@final
class _Kept:
    """A text stream that also writes to a log."""

    def __init__(self, stream: TextIO, log: RankLog) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        """Write to the log first, because the terminal may be gone."""
        self._log.write(text.encode(errors="backslashreplace"))
        return self._stream.write(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


Lines = list[tuple[int, int, str]]
"""Rank, file descriptor, and one line or several without the last end of line."""

_MOST = 1 << 16  # bytes of a rank's lines that wait
_BATCH = 1 << 15  # bytes of lines on their way
_LONGEST_RELAYED = 1 << 12  # bytes of a line; a longer one is passed on in parts
_EACH = 64  # bytes that a line takes besides its text


@final
class Relay:
    """Takes what ranks write, and gives it out in batches of whole lines; for one thread."""

    def __init__(self) -> None:
        self._torn: dict[tuple[int, int], bytes] = {}
        self._lines: deque[tuple[int, int, bytes]] = deque()
        self._held: Counter[int] = Counter()  # bytes of each rank
        self._dropped: Counter[int] = Counter()  # lines of each rank, since the last that found room
        self._is_free = True

    def add(self, rank: int, descriptor: int, data: bytes) -> None:
        """Take what a rank has written to a file descriptor."""
        source = rank, descriptor
        if rank in self._dropped and (end := data.rfind(b"\n")) >= 0:
            self._dropped[rank] += data.count(b"\n")
            self._torn[source] = b""
            data = data[end + 1 :]
        *lines, rest = (self._torn.get(source, b"") + data).split(b"\n")
        if len(rest) > _LONGEST_RELAYED:
            lines, rest = [*lines, rest], b""
        self._torn[source] = rest
        for line in lines:
            for start in range(0, len(line) or 1, _LONGEST_RELAYED):
                self._keep(rank, descriptor, line[start : start + _LONGEST_RELAYED])

    def end(self, rank: int, descriptor: int) -> None:
        """Take note that a rank writes no more to a file descriptor."""
        if rest := self._torn.pop((rank, descriptor), b""):
            self._keep(rank, descriptor, rest)

    def take(self) -> Lines:
        """Return the next batch; an empty one while the last is not shown yet."""
        if not self._is_free:
            return []
        taken = self._take(_BATCH)
        self._is_free = not taken
        return taken

    def take_all(self) -> Lines:
        """Return all that is left, at the end."""
        for source in list(self._torn):
            self.end(*source)
        taken: Lines = []
        while batch := self._take(_MOST):
            taken += batch
        return taken

    def shown(self) -> None:
        """Take note that the last batch was shown."""
        self._is_free = True

    def _keep(self, rank: int, descriptor: int, line: bytes) -> None:
        size = _EACH + len(line)
        if rank in self._dropped or self._held[rank] + size > _MOST:
            self._dropped[rank] += 1
            return
        self._held[rank] += size
        self._lines.append((rank, descriptor, line))

    def _take(self, most: int) -> Lines:
        taken: Lines = []
        while self._lines and most > 0:
            rank, descriptor, line = self._lines.popleft()
            size = _EACH + len(line)
            self._held[rank] -= size
            most -= size
            text = line.decode(errors="replace")
            if taken and taken[-1][:2] == (rank, descriptor):
                text = f"{taken.pop()[2]}\n{text}"
            taken.append((rank, descriptor, text))
        for rank in [rank for rank in self._dropped if self._held[rank] <= _MOST // 2]:
            count = self._dropped.pop(rank)
            note = f"... {count:,} lines are not shown here; log/rank-{rank:05d}.log of the run has them"
            self._keep(rank, 2, note.encode())
        return taken
