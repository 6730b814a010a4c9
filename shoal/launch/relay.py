"""Lines of a host's ranks on their way to the host that leads, whose stream shows those of all hosts.

A rank may print without end, and the stream may take lines slowly. So each rank has a buffer of `_MOST` bytes
here, and one batch is on its way at a time: the next one follows when the host that leads has shown the last.
Lines that find no room are dropped and counted. Neither the rank nor the launchers wait, and the rank's log
has all lines.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import final

Lines = list[tuple[int, int, str]]
"""Rank, file descriptor, and one line or several without the last end of line."""

_MOST = 1 << 16  # bytes of a rank's lines that wait
_BATCH = 1 << 15  # bytes of lines on their way
_LONGEST = 1 << 12  # bytes of a line; a longer one is passed on in parts
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
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._torn[source] = rest
        for line in lines:
            for start in range(0, len(line) or 1, _LONGEST):
                self._keep(rank, descriptor, line[start : start + _LONGEST])

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
