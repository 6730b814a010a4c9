"""The timeline file of a rank, as recorders write it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from shoal.record.append import AppendFile
from shoal.record.clock_exchange import clock_name
from shoal.timeline.lines import header_line, span_line

_FLUSH_SECONDS = 1.0

Fields = tuple[str, str, str, float, float, int, tuple[int, ...], str, str, tuple[float, float] | None]
"""The arguments of `span_line`, with its times still on the clock of the process."""


class SpanFile:
    """Append spans to the timeline file of a rank, about once a second. A failure costs only the record.

    Args:
        path: The timeline file of the rank; a resumed run appends to it.
        rank: The global rank.
        say: Called with the report of a failure to write, one line.
        first: The global rank from which groups of spans count.

    Attributes:
        spans: Spans that are not written yet; any thread may append to them.
    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int, say: Callable[[str], object], first: int = 0
    ) -> None:
        self._file = AppendFile(path, "the timeline", say)
        self._origin = time.perf_counter()
        self._file.write(header_line(rank, time.time_ns(), clock_name(), round(self._origin * 1e9)))
        self._first = first
        self.spans: list[Fields] = []
        self._flushed = self._origin

    def flush_if_due(self, now: float) -> None:
        """Write the spans if the last time is a second ago; `now` is a reading of `time.perf_counter`."""
        if now - self._flushed >= _FLUSH_SECONDS:
            self._flushed = now
            self.flush()

    def flush(self) -> None:
        """Write the spans."""
        # Other threads may append now: they add only behind the spans taken here.
        count = len(self.spans)
        taken = self.spans[:count]
        del self.spans[:count]
        origin, first = self._origin, self._first
        self._file.write(
            "".join(
                span_line(
                    kind,
                    lane,
                    name,
                    start - origin,
                    duration,
                    bytes,
                    tuple(each + first for each in group) if first else group,
                    algorithm,
                    purpose,
                    host and (host[0] - origin, host[1] - origin),
                )
                for kind, lane, name, start, duration, bytes, group, algorithm, purpose, host in taken
            )
        )

    def close(self) -> None:
        """Write the spans and close the file; spans that come later are lost."""
        self.flush()
        self._file.close()
