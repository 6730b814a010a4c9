"""The Timeline: spans of all ranks on one clock, and the files that hold them, one a rank."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.limits import json_of
from shoal.lines import bounded_lines
from shoal.timeline.clocks import OneClock, Origin, read_ties
from shoal.timeline.lines import FORMAT, header_line, parse_span, span_line
from shoal.timeline.span import Kind, Span


class Timeline:
    """Spans, sorted by start.

    Args:
        spans: The spans, in any order.
        origin_unix_ns: The wall-clock time of second 0, in nanoseconds; 0 for a prediction.
        clock_error: Seconds by which times of different ranks may be shifted against each other; None if it
            is not known, since hosts have clocks of their own that were not compared.
        hosts: By rank, what its host is called; "" or no entry if it is not known.
    """

    def __init__(
        self,
        spans: Iterable[Span],
        *,
        origin_unix_ns: int = 0,
        clock_error: float | None = 0.0,
        hosts: Mapping[int, str] | None = None,
    ) -> None:
        self.spans: tuple[Span, ...] = tuple(sorted(spans, key=lambda span: span.start))
        self.origin_unix_ns = origin_unix_ns
        self.clock_error = clock_error
        self.hosts = {rank: host for rank, host in (hosts or {}).items() if host}

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have spans, ascending."""
        return tuple(sorted(self._by_rank))

    def of(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of one rank, sorted by start."""
        return self._by_rank.get(rank, ())

    def steps(self) -> tuple[int, ...]:
        """Return the indices of the steps that any rank finished, ascending."""
        return self._indices

    def step(self, rank: int, index: int) -> Span | None:
        """Return the span of a rank's step: the last one, if a resumed run repeated that step."""
        return self._steps.get(rank, {}).get(index)

    def window(self, start: float, stop: float) -> Timeline:
        """Return the spans that lie in [start, stop) wholly or in part, uncut."""
        inside = (span for span in self.spans if span.start < stop and span.stop > start)
        return self.with_spans(inside)

    def with_spans(self, spans: Iterable[Span]) -> Timeline:
        """Return a Timeline of other spans, on the same clock and hosts."""
        return Timeline(
            spans, origin_unix_ns=self.origin_unix_ns, clock_error=self.clock_error, hosts=self.hosts
        )

    def since_step(self, index: int) -> Timeline:
        """Return the spans since the first rank last began this step; none if it did not finish it."""
        first = self.step(self.ranks[0], index) if self.ranks else None
        return self.window(math.inf if first is None else first.start, math.inf)

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> Timeline:
        """Read the timeline files of a directory; a directory without any gives an empty Timeline.

        Second 0 is the earliest origin in the files. Times of hosts whose clocks were compared are on one
        clock; see `shoal.timeline.clocks`. A torn line is skipped where a killed process leaves
        one: at the end of a file, or before the header of the process that went on.

        Raises:
            ShoalError: A file is malformed elsewhere; the message names file and line.
        """
        parts = [part for path in sorted(Path(directory).glob("rank-*.jsonl")) for part in _parts(path)]
        clock = OneClock.of((part.origin for part in parts), read_ties(directory))
        origin = min((clock.unix_ns(part.origin) for part in parts), default=0)
        spans = itertools.chain.from_iterable(part.spans(clock, origin) for part in parts)
        hosts = {part.rank: part.origin.host for part in parts}
        return cls(spans, origin_unix_ns=origin, clock_error=clock.error, hosts=hosts)

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write one file a rank into the directory, over files with these names; make the directory."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for rank in self.ranks:
            with (folder / f"rank-{rank:05d}.jsonl").open("w", encoding="utf-8") as file:
                file.write(header_line(rank, self.origin_unix_ns))
                for s in self.of(rank):
                    file.write(
                        span_line(
                            s.kind,
                            s.lane,
                            s.name,
                            s.start,
                            s.duration,
                            s.bytes,
                            s.group,
                            s.algorithm,
                            s.purpose,
                            s.host,
                        )
                    )

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Span, ...]]:
        by_rank: dict[int, list[Span]] = {}
        for span in self.spans:
            by_rank.setdefault(span.rank, []).append(span)
        return {rank: tuple(spans) for rank, spans in by_rank.items()}

    @cached_property
    def _indices(self) -> tuple[int, ...]:
        return tuple(sorted({index for steps in self._steps.values() for index in steps}))

    @cached_property
    def _steps(self) -> dict[int, dict[int, Span]]:
        steps: dict[int, dict[int, Span]] = {}
        for span in self.spans:
            if span.kind == Kind.STEP:
                steps.setdefault(span.rank, {})[int(span.name)] = span
        return steps


@dataclass
class _Part:
    """The part of a file that one process wrote: a header and the numbered lines below it."""

    path: Path
    rank: int
    origin: Origin
    lines: list[tuple[int, dict[str, Any]]]

    def spans(self, clock: OneClock, origin_unix_ns: int) -> Iterator[Span]:
        """Yield the spans on the one clock, with starts counted from another origin."""
        offset = (clock.unix_ns(self.origin) - origin_unix_ns) / 1e9
        is_corrected = self.origin.host in clock.fits
        for number, fields in self.lines:
            try:
                more = clock.correction(self.origin, float(fields["start"])) if is_corrected else 0.0
                yield parse_span(fields, rank=self.rank, offset=offset + more)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ShoalError(f"{self.path}:{number}: not a span of a timeline: {error!r}") from error


def _parts(path: Path) -> list[_Part]:
    parts: list[_Part] = []
    torn: int | None = None
    for number, line in enumerate(bounded_lines(path), start=1):
        try:
            fields = json_of(line)
        except ValueError:
            _refuse(path, torn)
            torn = number
            continue
        if isinstance(fields, dict) and "timeline" in fields:
            parts.append(_part(path, number, fields))
            torn = None
        elif parts:
            _refuse(path, torn)
            parts[-1].lines.append((number, fields))
        else:
            raise ShoalError(f'{path}:{number}: a timeline file begins with a "timeline" header')
    return parts


def _part(path: Path, number: int, header: dict[str, Any]) -> _Part:
    if header["timeline"] != FORMAT:
        raise ShoalError(
            f"{path}:{number}: this timeline has format {header['timeline']!r}, and only {FORMAT} is known"
        )
    try:
        host, monotonic = str(header.get("host", "")), int(header.get("origin_monotonic_ns", 0))
        return _Part(path, int(header["rank"]), Origin(host, int(header["origin_unix_ns"]), monotonic), [])
    except (KeyError, TypeError, ValueError) as error:
        raise ShoalError(f"{path}:{number}: the header of this timeline is not whole: {error!r}") from error


def _refuse(path: Path, torn: int | None) -> None:
    """Raise for a line that cannot be read and that no killed process explains."""
    if torn is not None:
        raise ShoalError(f"{path}:{torn}: this line of a timeline cannot be read")
